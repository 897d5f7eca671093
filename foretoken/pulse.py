"""Judge by its answers whether a child process lives.

A busy one answers; a stopped or hung one does not.
"""

from __future__ import annotations

# A child stopped by a signal is killed after this time and this many questions. Both must pass:
# while this process itself is stopped or starved, time passes, but it asks no questions. A child
# that is not stopped may be busy, and has as long as its service allows.
MAX_SILENCE_S = 5.0
MIN_MISSED_HEARTBEATS = 4


class Heartbeats:
    """Counts heartbeats missed in a row, and the time since the first of them."""

    def __init__(self, max_missing_s: float) -> None:
        self._max_missing_s = max_missing_s
        self._num_missed = 0
        self.missing_since = 0.0

    def observe(self, beats: bool, asked_at: float, now: float) -> bool:
        """Count one heartbeat; return whether too many are missing for too long.

        ``asked_at`` and ``now``: times of question and answer in seconds.
        """
        if beats:
            self._num_missed = 0
            return False
        if self._num_missed == 0:
            self.missing_since = asked_at
        self._num_missed += 1
        return self._num_missed >= MIN_MISSED_HEARTBEATS and now - self.missing_since > self._max_missing_s


class Pulse:
    """Distinguishes a stopped or hung child from one that is busy or starts slowly.

    Attributes:
        has_begun: whether the child has ever answered. Before that it has any time, unless stopped.
    """

    def __init__(self, max_stall_s: float) -> None:
        self.has_begun = False
        self._last_turn: float | None = None
        self._runs, self._turns = Heartbeats(MAX_SILENCE_S), Heartbeats(max_stall_s)

    def judge(self, last_turn: float | None, is_stopped: bool, asked_at: float, now: float) -> str:
        """Return why the child must be killed; empty if it may live.

        Args:
            last_turn: the answer of ``Probe.last_turn``.
            is_stopped: whether a signal has stopped the process.
            asked_at: time of the question, in seconds.
            now: time of the answer, or of the end of the wait for it.
        """
        if last_turn is None:
            turns = not self.has_begun
        else:
            turns = last_turn != self._last_turn
            self.has_begun, self._last_turn = True, last_turn
        if self._runs.observe(not is_stopped, asked_at, now):
            return f"did not answer for {now - self._runs.missing_since:.1f} s"
        if self._turns.observe(turns, asked_at, now):
            failing = "answer" if last_turn is None else "turn its event loop"
            return f"did not {failing} for {now - self._turns.missing_since:.1f} s"
        return ""
