"""Strict numerics on a GPU or in Triton's interpreter: speculation changes no bit of the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.drafting import FINAL_NORM
from foretoken.models.config import load_config
from foretoken.sampling import SamplingParams
from tests.support import on_device
from tests.support.deployments import BLOCK, SeenHarness, Target
from tests.support.engine_harness import Request, Result, assert_bits
from tests.support.grammars import VOCAB
from tests.support.oracle_drafter import OracleDrafter
from tests.support.tiny_checkpoint import save_llama

pytestmark = pytest.mark.usefixtures("strict_products")
PROMPTS = [[int(token) for token in range(number + 5, 90, 2 + number)][:22] for number in range(2)]


class RandomTarget(Target):
    """Two layers of random weights without any heads."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_llama(folder, vocab_size=VOCAB, std=0.3)
        self.config = load_config(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> RandomTarget:
    return RandomTarget(tmp_path_factory.mktemp("target"))


def drafted(
    target: RandomTarget, texts: list[list[int]], requests: list[Request], device: str, *, dtype: str, overlap: bool
) -> tuple[list[Result], SeenHarness, OracleDrafter]:
    """Run all requests at once, prompts in chunks, with right and wrong drafts.

    The drafter checks that a hidden state that it is sent twice has one value.
    """
    oracle = OracleDrafter(
        texts,
        device,
        captured_layers=(1, FINAL_NORM),
        width=2 * target.config.hidden_size,
        dtype=getattr(torch, dtype),
        batch_rows=on_device.MAX_RUNNING,
        nodes=6,
        block_size=BLOCK,
        tolerance=0.0,
    )
    harness = strict_harness(
        target, device, dtype=dtype, max_nodes=6, overlap=overlap, sources=[oracle], chunk_tokens=15
    )
    return harness.run(requests), harness, oracle


def strict_harness(target: RandomTarget, device: str, **options: Any) -> SeenHarness:
    return on_device.harness(target, (), device, strict=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_drafts_change_no_bit(target: RandomTarget, dtype: str, device: str) -> None:
    """Compare with each text alone, in plain decode, its prompt as one chunk.

    Steps that wait for the host are compared by logprobs. Overlapped steps have no logprobs, so
    they are compared by hidden states.
    """
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=3),
        SamplingParams(temperature=0.9, seed=5, max_tokens=7, presence_penalty=0.4, logprobs=3),
    ]
    requests = [Request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    alone = strict_harness(target, device, dtype=dtype, overlap=False, prefix_cache=False)
    plain = [alone.run([request.plain()])[0] for request in requests]
    texts = [[*request.prompt, *result.token_ids, 3] for request, result in zip(requests, plain, strict=True)]
    waited, harness, drafter = drafted(target, texts, requests, device, dtype=dtype, overlap=False)
    for expected, got in zip(plain, waited, strict=True):
        assert_bits(expected, got)
        assert got.finished is not None and len(got.logprobs) == len(got.token_ids) > 6
        stats = got.finished.speculation
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert harness.engine.counters.num_overlapped_steps == 0

    # Alone, so that its steps have other sizes too.
    request = replace(requests[0], sampling=replace(params[0], logprobs=None))
    (got,), harness, again = drafted(target, texts, [request], device, dtype=dtype, overlap=True)
    assert got.token_ids == plain[0].token_ids
    assert harness.engine.counters.num_overlapped_steps > 0
    assert len(again.hidden) > len(request.prompt)
    for key, row in again.hidden.items():
        assert np.array_equal(row, drafter.hidden[key]), key
