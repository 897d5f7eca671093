"""Time overlapped steps, and teach by these times: costs, the controller, the prefill budget."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from verifier_svc.drafters.request import Shape
from verifier_svc.overlap.launch_time import LaunchTime
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.lookups import PassedOver
from verifier_svc.speculation.overlap_drafting import OverlapDrafting

# The first steps of a run; their times are not typical.
_UNTIMED_STEPS = 2


class StepFacts(NamedTuple):
    """What was known of a step when it was launched.

    Attributes:
        num_found_rows: how many of its rows only trees from the host need.
        num_batch_rows: how many sequences took part.
        has_joined: whether the prompt rows were in its own pass.
        is_timed: whether its time says something of later steps.
        kind: of its draft.
        launched_at: in seconds of time.perf_counter().
        gap_s: seconds that the GPU waited for its launch.
        passed_over: rows that do not verify what a look-up found.
    """

    shape: Shape
    num_rows: int
    num_found_rows: int
    num_batch_rows: int
    num_prompt_rows: int
    has_joined: bool
    is_timed: bool
    kind: Hashable
    launched_at: float
    gap_s: float
    passed_over: Mapping[Sequence, PassedOver]


class OverlapTimes:
    """The times of one run's steps, in seconds of time.perf_counter().

    Only the engine thread uses it.

    Attributes:
        num_launched: steps that were launched.
        num_read: steps that were read.
        launched_at, read_at: when the last one was launched, and read.
    """

    def __init__(self, drafting: OverlapDrafting, costs: DraftCosts, prefill: PrefillBudget) -> None:
        self._drafting, self._costs, self._prefill = drafting, costs, prefill
        self._launch_time = LaunchTime()
        self.num_launched = self.num_read = 0
        self.launched_at = self.read_at = 0.0
        # When the last step was done, and when the last one with masks got them.
        self._done_at = self._bound_at = 0.0
        # When the host began with the next launch.
        self._launching_from = 0.0

    @property
    def is_typical(self) -> bool:
        """Return whether the last launched step takes as long as later ones."""
        return self.num_launched > _UNTIMED_STEPS

    def begin(self) -> None:
        """Begin the run: no step was read yet."""
        self.read_at = time.perf_counter()

    def step_s(self, shape: Shape, num_batch_rows: int) -> float:
        """Return the seconds that a step should take without prompts; 0 without batch rows."""
        return self._drafting.step_s(shape, num_batch_rows, self._costs) if num_batch_rows else 0.0

    def launch_from(self, shape: Shape, num_batch_rows: int) -> float:
        """Return when to begin the next launch, while a step of this shape and size runs."""
        # The running step began when the one before was done.
        return self._done_at + self._launch_time.wait_s(self.step_s(shape, num_batch_rows))

    def begin_launch(self) -> None:
        """Note that the host begins with the next launch: messages, waiting sequences, prompts."""
        self._launching_from = time.perf_counter()

    def observe_launch(self, *, is_late: bool) -> float:
        """Count a launched step, and return the seconds that the GPU waited for it.

        ``is_late``: whether no step was in flight meanwhile.
        """
        self.num_launched += 1
        now = self.launched_at = time.perf_counter()
        self._launch_time.observe_launch(now - self._launching_from)
        return now - self._done_at if is_late else 0.0

    def mark_bound(self) -> None:
        """Note that the last launched step got its masks."""
        self._bound_at = time.perf_counter()

    def begun_at(self, oldest: StepFacts) -> float:
        """Return from when the GPU had nothing before the oldest step, and all that it needs.

        The host may have been slow before: to read the last step, to launch or to bind this one.
        """
        return max(self.read_at, oldest.launched_at, self._bound_at)

    def mark_done(self, oldest: StepFacts) -> float:
        """Note that the oldest step is done; return the seconds since it began."""
        self._done_at = time.perf_counter()
        return self._done_at - self.begun_at(oldest)

    def learn(self, facts: StepFacts) -> float:
        """Learn what the step took that was just read; return its seconds."""
        drafting, costs, now = self._drafting, self._costs, time.perf_counter()
        seconds, self.read_at = now - self.read_at, now
        self.num_read += 1
        is_timed = facts.is_timed and facts.num_batch_rows > 0
        self._launch_time.observe_step(seconds)
        if is_timed and drafting.drafter is None and not facts.num_prompt_rows:
            costs.observe_step(facts.num_rows, seconds - facts.gap_s)
        else:
            costs.skip_step()
        if facts.num_prompt_rows and self.num_read > _UNTIMED_STEPS:
            step_s = self.step_s(facts.shape, facts.num_batch_rows)
            self._prefill.observe(facts.num_prompt_rows, seconds, step_s, has_joined=facts.has_joined)
        if is_timed and drafting.controller is not None:
            controller = drafting.controller
            # What rows of look-ups take says nothing of the shape, nor does a launch that the GPU
            # waited for: it had no work then, not even drafts.
            base_rows = facts.num_rows - facts.num_found_rows
            late_s = max(facts.gap_s - controller.draft_s(facts.shape, facts.num_batch_rows), 0.0)
            extra_s = costs.plain_step_s(facts.num_rows) - costs.plain_step_s(base_rows) + late_s
            controller.observe_step(
                facts.shape, facts.num_batch_rows, seconds - extra_s, num_prompt_tokens=facts.num_prompt_rows
            )
        return seconds
