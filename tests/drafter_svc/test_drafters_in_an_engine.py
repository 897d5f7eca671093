"""Drafters with a cache in a real engine: blocks, prefix hits, preemptions, lost drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.standalone import StandaloneDrafter
from foretoken.drafter import Drafter
from foretoken.models.config import load_config
from foretoken.sampling import SamplingParams
from tests.references.head_files import eagle3_files, eagle_files, mimo_target, random_target, write_folder
from tests.support.engine_harness import Harness, Request, Result
from tests.support.tiny_checkpoint import save_tokenizer
from verifier_svc.model.runner import ModelRunner

BLOCK = 16
NUM_BLOCKS = 96
KINDS = ["STANDALONE", "EAGLE", "EAGLE3", "MTP"]
PROMPTS = [[7, 8, 9, 7, 8, 9, 7], list(range(20, 60)), list(range(20, 60)), [3] * 33, [*range(20, 52), 1, 2, 3]]


class Deployment:
    """A target on disk, and drafters for it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.folder = folder / "target"
        self.head = folder / "head"
        if kind == "MTP":
            mimo_target(self.folder)
        else:
            random_target(self.folder)
            if kind != "STANDALONE":
                write_folder(self.head, *(eagle3_files() if kind == "EAGLE3" else eagle_files()))
        self.config = load_config(self.folder)
        save_tokenizer(self.folder, [f"w{i}" for i in range(self.config.vocab_size)])

    def drafter(self) -> Drafter:
        if self.kind == "STANDALONE":
            return StandaloneDrafter(self.folder)
        return HeadDrafter(self.kind, None if self.kind == "MTP" else self.head)  # type: ignore[arg-type]

    def harness(self, drafter: Drafter | None, *, num_blocks: int = NUM_BLOCKS, **options: Any) -> Harness:
        runner = ModelRunner(self.folder, threads=1, num_blocks=num_blocks, block_size=BLOCK)
        runner.warm_up()
        return Harness(
            runner,
            vocab_size=self.config.vocab_size,
            num_blocks=num_blocks,
            block_size=BLOCK,
            drafters={} if drafter is None else {"d": drafter},
            hidden_size=self.config.hidden_size,
            num_layers=self.config.num_layers,
            checkpoint=str(self.folder),
            **options,
        )


def requests(temperature: float, max_tokens: int = 40) -> list[Request]:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    out = [Request(prompt, params) for prompt in PROMPTS]
    out.append(Request(PROMPTS[0], params, choice_index=1))
    return out


def assert_same_text(expected: list[Result], got: list[Result]) -> None:
    for want, have in zip(expected, got, strict=True):
        assert have.token_ids == want.token_ids
        assert have.logprobs == want.logprobs


@pytest.fixture(params=KINDS)
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Deployment:
    return Deployment(tmp_path, request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_right(tmp_path: Path, temperature: float) -> None:
    deployment = Deployment(tmp_path, "STANDALONE")
    expected = deployment.harness(None).run(requests(temperature))
    drafter = deployment.drafter()
    harness = deployment.harness(drafter, num_steps=4, branches=1, max_nodes=5)
    got = harness.run(requests(temperature))
    assert_same_text(expected, got)
    for result in got:
        assert result.finished is not None and result.finished.speculation is not None
        figures = result.finished.speculation
        assert figures.num_draft_tokens > 20
        # Everything except the part that the output's limit cut off.
        assert figures.num_draft_tokens - figures.num_accepted_tokens <= 4
    assert drafter.gauges()["draft_window_rows"] == 0
    harness.drain()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_plain_decodes(deployment: Deployment, temperature: float) -> None:
    expected = deployment.harness(None).run(requests(temperature))
    drafter = deployment.drafter()
    harness = deployment.harness(drafter, num_steps=3, branches=4, max_nodes=12)
    assert_same_text(expected, harness.run(requests(temperature)))
    assert drafter.gauges()["draft_drafted_rows"] > 20
    assert drafter.gauges()["draft_window_rows"] == 0
    assert harness.sources[0].failures == []
    harness.drain()


def test_a_prefix_hit_is_no_window(deployment: Deployment) -> None:
    drafter = deployment.drafter()
    harness = deployment.harness(drafter, num_steps=3, branches=2, chunk_tokens=24)
    first, *_ = harness.run(requests(0.0)[1:2])
    sent = drafter.gauges()["draft_extend_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    turn = [*PROMPTS[1], *first.token_ids, 5, 6, 7]
    harness.run([Request(turn, params)])
    # 80 tokens of the first turn fill whole blocks; nobody needed the last one's hidden states.
    assert drafter.gauges()["draft_extend_tokens"] - sent <= len(turn) - 64 + 12
    assert drafter.gauges()["draft_window_rows"] == 0


def test_preempted_sequences_and_recycled_blocks(deployment: Deployment) -> None:
    expected = deployment.harness(None).run(requests(0.9, 60))
    drafter = deployment.drafter()
    harness = deployment.harness(drafter, num_blocks=18, num_steps=3, branches=3)
    assert_same_text(expected, harness.run(requests(0.9, 60)))
    assert harness.scheduler.num_preemptions > 0
    assert drafter.gauges()["draft_window_rows"] == 0
    assert harness.sources[0].failures == []
    harness.drain()


def test_a_drafter_that_comes_back_drafts_over_a_window(deployment: Deployment) -> None:
    expected = deployment.harness(None).run(requests(0.0, 60))
    drafter = deployment.drafter()
    harness = deployment.harness(drafter, num_steps=3, branches=3)
    every = harness.sources[0].dies_and_returns(every=12, dies_at=5, returns_at=9)
    assert_same_text(expected, harness.run(requests(0.0, 60), every_step=every))
    gauges = drafter.gauges()
    assert gauges["draft_drafted_rows"] > 0
    # A draft model is sent all tokens again, and a head only recent hidden states.
    assert (gauges["draft_window_rows"] > 0) == (deployment.kind != "STANDALONE")
