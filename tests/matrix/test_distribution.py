"""Three tokens over many seeds have the model's joint distribution with every drafter (chi-square).

The truth is enumerated from the same checkpoint's logits in transformers. Seeds are fixed: a run is
repeatable.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.deployments import KINDS, Target, Targets
from tests.support.engine_harness import Request

VOCAB_SIZE = 5
PROMPT = [1, 4, 2, 2, 0, 3, 1, 1, 4]
NUM_SEEDS = 2500
# The compared tokens are drafted: the tokens before them let a drafter and its gate begin.
SKIPPED, LOOKED_AT = 2, 3
MAX_TOKENS = SKIPPED + LOOKED_AT + 2
FEWEST_EXPECTED = 5.0


@pytest.fixture(scope="module")
def small_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("small"), steps=0, vocab_size=VOCAB_SIZE)


def truth(target: Target, temperature: float) -> NDArray[np.float64]:
    """Return float64 [5 ** 3]: chances of the compared tokens, whatever came before them."""
    length = SKIPPED + LOOKED_AT
    paths = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=length)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(paths), -1), paths], 1)
    with torch.no_grad():
        logits = target.model(ids).logits[:, len(PROMPT) - 1 : -1].double()
    chances = (logits / temperature).softmax(-1).gather(2, paths[:, :, None]).prod(1)[:, 0]
    found: NDArray[np.float64] = chances.view(VOCAB_SIZE**SKIPPED, -1).sum(0).numpy()
    return found


def p_value(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Return chi-square's p-value; outcomes expected less than five times count as one."""
    expected = chances * counts.sum()
    rare = expected < FEWEST_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    return float(chisquare(observed[kept], wanted[kept]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_tokens(small_targets: Targets, kind: str) -> None:
    target, drafters = small_targets.of_kind(kind)
    harness = target.harness(drafters, max_running=32, eos_ids=frozenset(), token_limit=VOCAB_SIZE)
    speculation = SpeculationOptions(drafter="merge" if len(drafters) > 1 else "auto")
    results = harness.run(
        Request(PROMPT, SamplingParams(seed=seed, max_tokens=MAX_TOKENS), speculation=speculation)
        for seed in range(NUM_SEEDS)
    )
    counts = np.zeros(VOCAB_SIZE**LOOKED_AT, np.int64)
    for result in results:
        first, second, third = result.token_ids[SKIPPED : SKIPPED + LOOKED_AT]
        counts[(first * VOCAB_SIZE + second) * VOCAB_SIZE + third] += 1
    assert p_value(counts, truth(target, 1.0)) > 0.01
    # So many samples distinguish even a slightly different temperature.
    assert p_value(counts, truth(target, 0.85)) < 1e-4
    if drafters:
        assert sum(walks.num_accepted for walks in harness.walks.values()) > NUM_SEEDS
        assert sum(walks.num_refused for walks in harness.walks.values()) > NUM_SEEDS / 4
    harness.drain()
