"""NaN or infinite logits end only their own request with an error: host, GPU, overlapped steps."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foretoken.errors import ModelOutputError
from foretoken.models.batch import ForwardBatch
from foretoken.sampling import SamplingParams
from tests.support import on_device
from tests.support.deployments import Targets
from tests.support.engine_harness import Harness, Request, Result
from tests.support.fitted_models import text
from tests.support.hash_target import HashTarget
from tests.support.oracle_drafter import OracleDrafter
from tests.support.runs import BLOCK, VOCAB, Runs, greedy, oracle_of, plain
from verifier_svc.sampling.device_masks import SentMasks
from verifier_svc.sampling.device_walker import DeviceWalker, WalkStage

DATA_LOSS = ModelOutputError("").code


class BrokenTarget(HashTarget):
    """A target with one logit of ``fault`` in each row that sees the tokens ``poison``."""

    def __init__(self, poison: list[int], fault: float) -> None:
        super().__init__(VOCAB, 400, BLOCK)
        self.poison: NDArray[np.int64] | None = np.array(poison)
        self._fault = fault

    def _logits(self, batch: ForwardBatch, row: int) -> NDArray[np.float32]:
        logits = super()._logits(batch, row)
        if self.poison is not None and holds(self._path(batch, row), self.poison):
            logits[3] = self._fault
        return logits


def holds(tokens: NDArray[np.int64], run: NDArray[np.int64]) -> bool:
    return any((tokens[at : at + len(run)] == run).all() for at in range(len(tokens) - len(run) + 1))


def harness_of(target: HashTarget, **options: object) -> Harness:
    return Harness(target, vocab_size=VOCAB, num_blocks=400, block_size=BLOCK, **options)  # type: ignore[arg-type]


def assert_broken(result: Result, expected: list[int]) -> None:
    assert result.finished is None and result.error is not None
    assert (result.error.code, result.error.field) == (DATA_LOSS, "")
    assert "NaN" in result.error.message and result.error.message.startswith("model: ")
    assert result.token_ids == expected


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("drafts", [False, True])
def test_one_request_breaks_and_the_others_go_on(fault: float, drafts: bool, caplog: pytest.LogCaptureFixture) -> None:
    requests = [greedy(seed, 9, 20) for seed in range(4)]
    expected = plain(requests)
    # The second request breaks at its first token, the third one amid its text.
    first = harness_of(BrokenTarget(requests[1].prompt[-3:], fault))
    amid = harness_of(
        BrokenTarget(expected[2].token_ids[5:9], fault),
        sources=[oracle_of(requests, expected)] if drafts else [],
        hidden_size=4,
        num_layers=2,
    )
    for harness, index, length in ((first, 1, 0), (amid, 2, 9)):
        with caplog.at_level(logging.ERROR):
            results = harness.run(requests)
        assert_broken(results[index], expected[index].token_ids[:length])
        for other in {0, 1, 2, 3} - {index}:
            assert results[other].error is None and results[other].token_ids == expected[other].token_ids
        harness.drain()
        assert [record.levelname for record in caplog.records] == ["ERROR"] and "NaN" in caplog.text
        caplog.clear()


def test_keys_and_values_of_a_broken_request_are_no_ones_prefix() -> None:
    request = greedy(1, 6 * BLOCK, 4)
    target = BrokenTarget(request.prompt[-2:], np.nan)
    harness = harness_of(target)
    assert_broken(harness.run([request])[0], [])
    # The hardware's fault is over.
    target.poison = None
    (again, third) = (harness.run([request])[0] for _ in range(2))
    assert again.finished is not None and again.finished.num_cached_tokens == 0
    assert third.finished is not None and third.finished.num_cached_tokens == 5 * BLOCK
    assert again.token_ids == third.token_ids == plain([request])[0].token_ids
    harness.drain()


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 7, 18])
def test_prompt_logprobs_that_are_not_numbers_are_an_error(at: int, fault: float) -> None:
    """Also if the sampled row is sound, and if the prompt is longer than a chunk."""

    class OneRow(HashTarget):
        def _logits(self, batch: ForwardBatch, row: int) -> NDArray[np.float32]:
            logits = super()._logits(batch, row)
            return np.full_like(logits, fault) if len(self._path(batch, row)) == at + 1 else logits

    asks, asks_not = (
        Request(greedy(5, 20, 1).prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=wanted))
        for wanted in (1, None)
    )
    harness = harness_of(OneRow(VOCAB, 400, BLOCK), chunk_tokens=8)
    broken, sound = harness.run([asks, asks_not])
    assert_broken(broken, [])
    assert sound.token_ids == plain([asks_not])[0].token_ids
    harness.drain()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_that_breaks_leaves_a_run_that_goes_on(drafts: bool) -> None:
    requests = [greedy(seed, 9, 40) for seed in range(4)]
    expected = plain(requests)
    broken = BrokenTarget(expected[2].token_ids[15:19], np.nan)
    runs = Runs([oracle_of(requests, expected)] if drafts else [], target=broken)
    results = runs.harness.run(requests)
    assert_broken(results[2], expected[2].token_ids[:19])
    for other in (0, 1, 3):
        assert results[other].token_ids == expected[other].token_ids
    # One run: none was begun for the requests that are left.
    assert runs.num_ahead > 5 and sum(step.num_runs for step in runs.steps) == 1
    runs.harness.drain()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "drafts"), [(True, True), (True, False), (False, False)])
def test_a_broken_row_on_a_gpu(
    targets: Targets, overlap: bool, drafts: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer prompt's request breaks in mid-text, in a run of steps too; the other goes on."""
    target = targets["llama"]
    requests = [Request(text(seed, length), greedy(0, 1, 9).sampling) for seed, length in ((1, 40), (2, 20))]
    expected = target.harness({}).run(requests)
    texts = [[*request.prompt, *result.token_ids, 3] for request, result in zip(requests, expected, strict=True)]
    oracle = OracleDrafter(
        texts,
        device,
        captured_layers=(1,),
        width=target.config.hidden_size,
        dtype=torch.float32,
        batch_rows=on_device.MAX_RUNNING,
        nodes=4,
        block_size=8,
    )
    harness = on_device.harness(target, (), device, max_nodes=4, overlap=overlap, sources=[oracle] if drafts else [])
    sample_and_walk = DeviceWalker.sample_and_walk

    def spoil(self: DeviceWalker, stage: WalkStage, logits: torch.Tensor, masks: SentMasks | None = None) -> None:
        # Steps that begin after the fourth token.
        asked = stage.asked.device
        at = asked["positions"][asked["row_seqs"].long().clamp(min=0)]
        is_broken = (asked["row_seqs"] >= 0) & (at >= 44)
        logits[:, 5] = torch.where(is_broken, float("nan"), logits[:, 5])
        sample_and_walk(self, stage, logits, masks)

    monkeypatch.setattr(DeviceWalker, "sample_and_walk", spoil)
    broken, sound = harness.run(requests)
    count = len(broken.token_ids)
    assert 4 <= count < 9 and (drafts or count == 4)
    assert_broken(broken, expected[0].token_ids[:count])
    assert sound.error is None and sound.token_ids == expected[1].token_ids
    assert (harness.engine.counters.num_overlapped_steps > 2) == overlap
    harness.drain()
