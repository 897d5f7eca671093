"""A client's prediction, with the engine and the n-gram drafter, saves steps and keeps the text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request, Result
from tests.support.hash_target import HashTarget

VOCAB = 40
BLOCK = 4
NUM_TOKENS = 40


def harness(*, drafter: bool = True, num_blocks: int = 400) -> Harness:
    ngram = NgramDrafter(NgramSettings(capacity=10_000)) if drafter else None
    return Harness(
        HashTarget(VOCAB, num_blocks, BLOCK),
        vocab_size=VOCAB,
        num_blocks=num_blocks,
        block_size=BLOCK,
        drafters={"ngram": ngram} if ngram else None,
    )


def request(seed: int, temperature: float = 0.0) -> Request:
    prompt = np.random.default_rng(seed).integers(0, VOCAB, 11).tolist()
    return Request(prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS))


def plain(request: Request) -> list[int]:
    (result,) = harness(drafter=False).run([request])
    return result.token_ids


def accepted(result: Result) -> int:
    return sum(source > 0 for source in result.sources)


def edited(output: list[int]) -> list[int]:
    """Return the output with one token replaced, three deleted and two inserted."""
    other = (output[8] + 1) % VOCAB
    return [*output[:8], other, *output[9:16], *output[19:26], 1, 2, *output[26:]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_prediction_saves_steps_and_changes_nothing(temperature: float) -> None:
    asked = request(1, temperature)
    output = plain(asked)
    # The target is a hash: without a prediction there is next to nothing to accept.
    (alone,) = harness().run([asked])
    assert alone.token_ids == output and accepted(alone) < 4
    exact = harness()
    (right,) = exact.run([replace(asked, prediction=output)])
    assert right.token_ids == output
    assert accepted(right) > 0.7 * NUM_TOKENS and exact.num_steps < NUM_TOKENS / 2
    (close,) = harness().run([replace(asked, prediction=edited(output))])
    assert close.token_ids == output
    assert accepted(right) > accepted(close) > 0.4 * NUM_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_prediction_changes_nothing(temperature: float) -> None:
    asked = request(2, temperature)
    wrong = np.random.default_rng(5).integers(0, VOCAB, 60).tolist()
    (result,) = harness().run([replace(asked, prediction=wrong)])
    assert result.token_ids == plain(asked)


def test_the_first_draft_is_waited_for() -> None:
    asked = request(3)
    (result,) = harness().run([replace(asked, prediction=plain(asked))])
    # The first output token is prefill's; the first decode step already verifies the prediction.
    assert result.sources[:4] == [0, 1, 1, 1]


def test_each_row_has_its_own() -> None:
    requests = [request(seed) for seed in range(4)]
    outputs = [plain(each) for each in requests]
    together = harness()
    results = together.run([replace(r, prediction=o) for r, o in zip(requests, outputs, strict=True)])
    assert [result.token_ids for result in results] == outputs
    assert min(map(accepted, results)) > 0.7 * NUM_TOKENS
    # Given to the others' rows it is of no use: a prediction drafts only for its own row.
    crossed = harness()
    results = crossed.run([requests[0], replace(requests[1], prediction=outputs[0])])
    assert [result.token_ids for result in results] == outputs[:2]
    assert max(map(accepted, results)) < 4


def test_it_survives_preemption() -> None:
    requests = [request(seed) for seed in range(4)]
    outputs = [plain(each) for each in requests]
    tight = harness(num_blocks=30)
    results = tight.run([replace(r, prediction=o) for r, o in zip(requests, outputs, strict=True)])
    tight.drain()
    assert tight.scheduler.num_preemptions > 0
    assert [result.token_ids for result in results] == outputs
    assert min(map(accepted, results)) > 0.5 * NUM_TOKENS


@pytest.mark.parametrize("done", [1, 9, 20])
def test_a_resumed_sequence_goes_on_in_it(done: int) -> None:
    asked = request(6)
    output = plain(asked)
    resumed = harness()
    (result,) = resumed.run([replace(asked, output=output[:done], attempt=1, prediction=output)])
    assert result.token_ids[done:] == output[done:]
    assert accepted(result) > 0.6 * (NUM_TOKENS - done)
