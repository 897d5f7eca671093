"""Wait for the device, and look after the drafter meanwhile: a step goes on without late trees."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.overlap.times import StepFacts
from verifier_svc.speculation.overlap_drafting import OverlapDrafting

if TYPE_CHECKING:
    from verifier_svc.overlap.step import OverlappedStep

# Seconds between checks whether a step is done. The next one runs meanwhile, so the GPU does not
# wait.
POLL_S = 50e-6
# Seconds that a step may take longer for each prompt token that it computes.
_TOKEN_S = 1e-3


class OverlapWait:
    """Waits for the steps of one run. Only the engine thread uses it.

    Attributes:
        deadlines: of the drafter's steps.
        is_lost: whether a draft was late or the drafter is gone; the run is about to end then.
    """

    def __init__(self, step: OverlappedStep, drafting: OverlapDrafting, deadlines: StepDeadlines) -> None:
        self._step, self._drafting = step, drafting
        self.deadlines = deadlines
        self.is_lost = False

    def until(self, is_there: Callable[[], bool], in_flight: deque[StepFacts], since: float) -> bool:
        """Wait for something of the oldest step. Return False if it had to go on without its trees.

        Args:
            in_flight: the steps in flight, oldest first.
            since: from when the drafter's time counts, in seconds of time.perf_counter().
        """
        kind = in_flight[0].kind
        deadline = since + self.deadlines.seconds(kind) + _TOKEN_S * sum(each.num_prompt_rows for each in in_flight)
        while not is_there():
            if self._drafting.drafter is not None and (self.is_lost or not self._is_alive(deadline, kind)):
                # Repeat it: a drafter that resumes late may overwrite the release.
                self._step.release()
                self.is_lost = True
            time.sleep(POLL_S)
        return not self.is_lost

    def _is_alive(self, deadline: float, kind: Hashable) -> bool:
        drafting = self._drafting
        assert drafting.drafter is not None and drafting.attachment is not None
        if not drafting.is_open:
            return False
        if time.perf_counter() < deadline:
            return True
        drafting.attachment.leave_alone()
        if not self.deadlines.is_excused(kind):
            timeout_s = self.deadlines.seconds(kind)
            drafting.drafter.source.report_failure(f"no draft within {timeout_s * 1e3:.0f} ms")
        return False
