"""Logprobs computed on a device equal the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken.results import TokenLogprobs
from verifier_svc.sampling.device_logprobs import device_logprobs
from verifier_svc.sampling.verify import token_logprobs

ROWS = 37


def logits_of(vocab: int) -> np.ndarray:
    """Return logits with many ties, both zeros, forbidden tokens, and values far above the rest."""
    random = np.random.default_rng(vocab)
    logits = (random.integers(-20, 20, (ROWS, vocab)) / 4).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -np.inf
    logits[random.random(logits.shape) < 0.1] = -0.0
    logits[random.random(logits.shape) < 0.1] = 0.0
    logits[::5, vocab // 2] = 80.0
    return logits


def assert_same(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for have, want in zip(found, expected, strict=True):
        assert (have.token_id, have.rank) == (want.token_id, want.rank)
        assert [token for token, _ in have.top] == [token for token, _ in want.top]
        ours, theirs = ([each.logprob, *(logprob for _, logprob in each.top)] for each in (have, want))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab", [2, 3, 40, 129, 1000, 4097])
@pytest.mark.parametrize("top_k", [0, 1, 5, 20])
def test_they_are_those_of_the_host(vocab: int, top_k: int, device: str) -> None:
    logits = logits_of(vocab)
    random = np.random.default_rng(top_k)
    rows = random.permutation(ROWS).tolist()
    tokens = [int(random.choice(np.flatnonzero(logits[row] > -np.inf))) for row in rows]
    found = device_logprobs(torch.from_numpy(logits).to(device), rows, tokens, [top_k] * ROWS)
    assert_same(found, token_logprobs(logits[rows], tokens, top_k))


def test_a_row_has_the_same_bits_beside_others(device: str) -> None:
    logits = torch.from_numpy(logits_of(333)).to(device)
    together = device_logprobs(logits, range(ROWS), [7] * ROWS, [row % 4 for row in range(ROWS)])
    alone = [device_logprobs(logits, [row], [7], [row % 4])[0] for row in range(ROWS)]
    assert together == alone and [len(each.top) for each in alone] == [row % 4 for row in range(ROWS)]


def test_of_no_row_there_is_nothing(device: str) -> None:
    assert device_logprobs(torch.zeros(1, 4, device=device), [], [], []) == []
