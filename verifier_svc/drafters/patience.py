"""What waiting for one drafter costs, and how much of it is still affordable."""

from __future__ import annotations

from collections.abc import Hashable

# Weight of a new wait in the estimate of what collecting a draft costs.
WAIT_SMOOTHING = 0.05
# Share of the time that may go into waits which no draft could have paid back: plain decode keeps 98% of its speed.
AFFORDABLE_SHARE = 0.02
# Draft timeouts that are affordable at once: as many as open the circuit of a drafter that has stopped.
AFFORDABLE_TIMEOUTS = 3


class Patience:
    """Of one drafter. A wait longer than all of its tokens were worth is lost, whatever the acceptance; such losses
    are paid from a budget that fills with time, and where it is empty nobody waits: the drafter is only scouted.

    A drafter on a GPU captures graphs, and compiles kernels, when it meets a kind of request for the first time: that
    wait says nothing of the next ones. It costs nothing if the drafter answers, or was late and has answered something
    else in time since: one that never does is late for another reason."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: the longest wait."""
        self._most_s = AFFORDABLE_TIMEOUTS * timeout_s
        self._left_s = self._most_s
        self._filled_at: float | None = None
        self._timeout_s = timeout_s
        # Kinds of requests that the attachment was waited for, and what those cost that were late, with nothing that
        # came in time since.
        self._kinds: set[Hashable] = set()
        self._lent_s = 0.0
        # When the drafter was last reported late, if nothing has come since.
        self._late_at: float | None = None
        # Smoothed seconds of a wait.
        self.wait_s = 0.0

    def has_some(self, now: float) -> bool:
        """Whether waiting is affordable at ``now``, in seconds of any steady clock."""
        if self._filled_at is not None:
            self._left_s = min(self._left_s + AFFORDABLE_SHARE * (now - self._filled_at), self._most_s)
        self._filled_at = now
        return self._left_s > 0.0

    def is_new(self, kind: Hashable) -> bool:
        """Whether a request of this kind is the attachment's first one; the next one is not."""
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def forget_kinds(self) -> None:
        """Of a new attachment nothing is known, and it owes nothing back."""
        self._kinds.clear()
        self._lent_s = 0.0

    def observe(self, waited_s: float, worth_s: float, *, is_first: bool = False, is_answered: bool = True) -> None:
        """Learn from a wait.

        Args:
            worth_s: the seconds that its drafts would have saved, had all been accepted.
            is_first: of its kind.
        """
        self.wait_s += WAIT_SMOOTHING * (waited_s - self.wait_s)
        if is_answered:
            self._left_s = min(self._left_s + self._lent_s, self._most_s)
            self._lent_s = 0.0
        if is_first and is_answered:
            return
        lost_s = max(waited_s - worth_s, 0.0)
        self._left_s -= lost_s
        if is_first:
            self._lent_s += lost_s

    def time_out(self, now: float) -> None:
        """A draft that was waited for did not come."""
        self._late_at = now

    def answer(self) -> None:
        """Something came."""
        self._late_at = None

    def times_out_again(self, now: float) -> bool:
        """Whether a draft that nobody waited for and that has not come is one more time-out in a row: the budget may
        be used up before a drafter that has stopped is found out."""
        if self._late_at is None or now - self._late_at < self._timeout_s:
            return False
        self._late_at = now
        return True
