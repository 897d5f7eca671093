"""When to launch the next overlapped step: so late that requests which come meanwhile join."""

from __future__ import annotations

from collections import deque

# The host lets at most this share of the running step's time pass, and leaves this many times what
# a launch takes it, from the messages before it on.
_MOST_SHARE = 0.7
_HOST_TIMES = 1.5
# The shortest of so many steps counts, and the longest launch: a launch that is late makes the GPU
# wait, an early one only a request.
_NUM_STEPS = 8


class LaunchTime:
    """Learn how long launches and steps take. Only the engine thread uses it."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._launches: deque[float] = deque(maxlen=_NUM_STEPS)

    def observe_step(self, seconds: float) -> None:
        """Learn what a step took."""
        self._steps.append(seconds)

    def observe_launch(self, seconds: float) -> None:
        """Learn what it took the host to handle messages, start sequences and launch a step."""
        self._launches.append(seconds)

    def wait_s(self, step_s: float) -> float:
        """Return how many seconds of the running step to let pass; 0 until enough steps were seen.

        ``step_s``: what such a step should take.
        """
        if len(self._steps) < _NUM_STEPS:
            return 0.0
        shortest = min(step_s, *self._steps)
        return max(min(_MOST_SHARE * shortest, shortest - _HOST_TIMES * max(self._launches)), 0.0)
