"""The contract of a drafter: the calls that a verifier makes, by any transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo

if TYPE_CHECKING:
    # The n-gram drafter does not import torch.
    from foretoken.models.target_weights import TargetWeights
    from foretoken.overlap_memory import OverlapMemory, StreamOrder


class Drafter(Protocol):
    """Proposes trees.

    A new drafter is a file that implements this, and a row in drafter_svc/algorithms.py.

    Calls come one after the other. A drafter that needs tokens alone, in the verifier's own
    process, is called from two threads. An exception ends the attachment, never a request.
    """

    @property
    def algorithm(self) -> str:
        """NGRAM, EAGLE3, ..."""
        ...

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        """Return what requests for this target must carry.

        Raises PreconditionError if the two do not fit.
        """
        ...

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        """Forget every sequence and prepare for this target.

        ``weights``: the target's embedding and head, if they can be shared. Raises
        PreconditionError if drafter and target do not fit.
        """
        ...

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Learn the new tokens, then propose a tree for each row that asks for one."""
        ...

    def release(self, batch_slots: Sequence[int]) -> None:
        """Forget the sequences in these batch slots. What other sequences can use stays."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return drafter-specific figures for metrics, such as ``ngram_nodes``."""
        ...


@runtime_checkable
class DraftsOverlapped(Protocol):
    """A Drafter that also takes requests whose tokens are in device memory."""

    def set_overlap_memory(self, memory: OverlapMemory, order: StreamOrder) -> None:
        """Set the memory that holds such requests' tokens and takes their trees.

        Call this after ``attach``. It holds until the next call.
        """
        ...

    @property
    def is_prepared(self) -> bool:
        """Return whether ``prepare`` has nothing left to do."""
        ...

    def prepare(self) -> bool:
        """Prepare for one more usual kind of such requests. Return whether it did.

        Called after ``set_overlap_memory`` while no request waits; one that comes meanwhile has to.
        Does nothing between the first and the last request of a run.
        """
        ...
