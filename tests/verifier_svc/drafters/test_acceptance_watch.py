"""One line is logged when hardly any draft is accepted, or
half as many as usual; one when that ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.sampling import SamplingParams
from tests.support.draft_requests import draft_batch
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from verifier_svc.drafters.acceptance_watch import MIN_SHARE, NUM_USUAL_WINDOWS, WINDOW_DRAFTS, AcceptanceWatch
from verifier_svc.info import drafter_state

HEAD = DrafterNeeds(captured_layers=(-1,), num_rerun=1, blocks=True)
MODEL = DrafterNeeds(blocks=True)


@dataclass
class Named:
    name: str = "eagle3"
    needs: DrafterNeeds = HEAD


def feed(watch: AcceptanceWatch, *shares: float) -> list[bool]:
    """Let windows of drafts pass; return whether each one was low."""
    found = []
    for share in shares:
        num_hits = round(share * WINDOW_DRAFTS)
        for number in range(WINDOW_DRAFTS):
            watch.observe(2 if number < num_hits else 0)
        found.append(watch.is_low)
    return found


def test_a_drafter_that_never_hits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch(Named())
    for _ in range(WINDOW_DRAFTS - 1):
        watch.observe(0)
    assert not watch.is_low and not caplog.messages
    watch.observe(0)
    assert watch.is_low
    feed(watch, 0.0, 0.04)
    assert caplog.messages == [
        f"drafter eagle3: speculation hardly works: 0 of its last {WINDOW_DRAFTS} drafts hit; likely causes: the head "
        "was trained for another target, another fine-tune of it or another chat template; a high temperature"
    ]


@pytest.mark.parametrize(
    ("needs", "cause"),
    [(HEAD, "the head was trained for"), (MODEL, "the draft model is of"), (DrafterNeeds(), "the text hardly repeats")],
)
def test_causes_are_those_of_the_kind_of_drafter(
    needs: DrafterNeeds, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    feed(AcceptanceWatch(Named(needs=needs)), 0.0)
    assert cause in caplog.text


def test_half_of_what_is_usual_is_low_and_three_quarters_are_not(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch(Named())
    assert feed(watch, *[0.8] * NUM_USUAL_WINDOWS) == [False] * NUM_USUAL_WINDOWS
    assert feed(watch, 0.41, 0.3, 0.5, 0.7, 0.7) == [False, True, True, False, False]
    low, recovered = caplog.messages
    assert "60 of its last 200 drafts hit, usually 7" in low
    assert "requests have changed" in low
    assert recovered == "drafter eagle3: drafts are accepted again: 140 of the last 200 hit"


def test_a_drafter_that_was_always_modest_is_not_low() -> None:
    assert feed(AcceptanceWatch(Named()), *[0.1] * 9, 0.06) == [False] * 10


def test_half_is_not_judged_before_the_usual_share_is_known() -> None:
    assert feed(AcceptanceWatch(Named()), *[0.9] * (NUM_USUAL_WINDOWS - 1), 0.2) == [False] * NUM_USUAL_WINDOWS


def test_low_windows_do_not_become_usual() -> None:
    watch = AcceptanceWatch(Named())
    feed(watch, *[0.8] * NUM_USUAL_WINDOWS)
    assert feed(watch, *[0.3] * 20) == [True] * 20
    assert feed(watch, 0.8) == [False]


def test_many_rows_of_a_step_end_one_window() -> None:
    watch = AcceptanceWatch(Named())
    watch.observe(3, num_drafts=WINDOW_DRAFTS - 1)
    watch.observe(0, num_drafts=10 * WINDOW_DRAFTS)
    assert not watch.is_low, f"one hit in eleven is more than {MIN_SHARE}"
    watch.observe(0, num_drafts=10 * WINDOW_DRAFTS)
    assert watch.is_low


class Constant:
    """A drafter that always drafts one token, which the target never samples."""

    algorithm = "CONSTANT"

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: object) -> None:
        """Prepare nothing."""

    def release(self, batch_slots: Sequence[int]) -> None:
        """Forget nothing."""

    def gauges(self) -> dict[str, float]:
        return {"constant": 1.0}

    def draft(self, request: DraftRequest) -> DraftBatch:
        starts, tokens, parents = [0], [], []
        for row in range(request.num_rows):
            tokens.append(int(request.new_tokens[request.new_token_starts[row + 1] - 1]))
            parents.append(-1)
            if request.max_nodes[row] > 1:
                tokens.append(0)
                parents.append(0)
            starts.append(len(tokens))
        columns = (np.array(column, np.int32) for column in (starts, tokens, parents))
        return draft_batch(request.epoch, request.step_id, *columns)


def test_an_engine_counts_drafts_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(
        HashTarget(50, 100, 4), vocab_size=50, num_blocks=100, block_size=4, drafters={"constant": Constant()}
    )
    (drafter,) = harness.engine.speculator.drafters
    assert not drafter_state(drafter).has_low_acceptance
    # Token 0 is never sampled; a client's choice of the drafter keeps its gate probing.
    never = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={0: -100.0})
    while drafter.counters.num_drafts < WINDOW_DRAFTS:
        assert not drafter.record.watch.is_low
        harness.run([Request([1, 2, 3], never)] * 8)
    assert drafter.counters.num_accepted_tokens == 0
    assert drafter_state(drafter).has_low_acceptance
    assert [record.levelname for record in caplog.records if "hardly works" in record.message] == ["WARNING"]
