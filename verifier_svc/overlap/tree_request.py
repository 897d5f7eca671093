"""Choose the shape of the trees that follow the last launched step, and request them.

Both happen once a step, and before requests may come that join the step after.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from foretoken.models.device_batch import seq_bucket
from verifier_svc.engine_counters import EngineCounters
from verifier_svc.overlap.blocks import OverlapBlocks
from verifier_svc.scheduling.batch_row import BatchRow
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.overlap_policy import OverlapPolicy
from verifier_svc.speculation.overlap_requests import OverlapRequests


class PostedRequest(NamedTuple):
    """A request for trees. ``is_drafted``: whether a drafter got one.

    ``kind``: of the step, for deadlines.
    """

    is_drafted: bool
    kind: Hashable


class TreeRequest:
    """The trees of the next step. Only the engine thread uses it.

    Attributes:
        lacks_blocks: whether the last choice could not be kept for want of KV blocks.
    """

    def __init__(
        self,
        drafting: OverlapDrafting,
        requests: OverlapRequests,
        policy: OverlapPolicy,
        blocks: OverlapBlocks,
        counters: EngineCounters,
    ) -> None:
        self._drafting, self._requests = drafting, requests
        self._policy, self._blocks, self._counters = policy, blocks, counters
        self._is_chosen, self.lacks_blocks = False, False
        # The sequences for which the shape was chosen; more may join before the launch.
        self._num_chosen_for = 0
        # None: not requested yet.
        self._posted: PostedRequest | None = None

    def choose(self, num_running: int) -> bool:
        """Choose the shape for so many sequences, unless that was done, and reserve blocks.

        Return whether the run can go on.
        """
        if self._is_chosen:
            return True
        self._num_chosen_for = max(num_running, 1)
        if not self._policy.choose(self._drafting, self._num_chosen_for):
            return False
        self._is_chosen = self._blocks.reserve()
        self.lacks_blocks = not self._is_chosen
        return self._is_chosen

    def post(self, step: int, launched: tuple[BatchRow | None, ...] | None, prompt_start: int) -> PostedRequest:
        """Request the trees after a step, unless that was done.

        Args:
            step: the number of the last launched step.
            launched: its batch rows; None if there is no such step in this run.
            prompt_start: where its prompts' hidden states begin.
        """
        if self._posted is None:
            num_sequences = sum(batch_row is not None for batch_row in launched or ())
            kind = self._drafting.shape, seq_bucket(max(num_sequences, 1)), self._requests.has_prompts
            if launched is not None:
                with self._counters.phase("draft_post"):
                    self._requests.post(step, launched, prompt_start)
            self._posted = PostedRequest(self._drafting.drafter is not None and launched is not None, kind)
        return self._posted

    @property
    def is_awaited(self) -> bool:
        """Return whether a drafter drafts for the next step, which is then launched in any case.

        The run's last request, after that step, tells the drafter that the run ends. Its answer
        says that it reads the shared memory no more.
        """
        return self._posted is not None and self._posted.is_drafted and self._drafting.is_current

    def suits(self, num_batch_rows: int) -> bool:
        """Return whether so many batch rows may have trees of the chosen shape.

        It was chosen before some requests came. A batch that is too large for it has no graph, so
        they join the step after, whose shape is chosen for them too.
        """
        return num_batch_rows <= self._num_chosen_for or self._drafting.suits(num_batch_rows)

    def begin_next(self) -> None:
        """Begin with the trees after the step that is launched now."""
        self._is_chosen, self._posted = False, None
