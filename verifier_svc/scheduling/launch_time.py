"""When to launch the next overlapped step: late enough that requests which come meanwhile join it."""

from __future__ import annotations

from collections import deque

# The host lets this share of the running step's time pass. Planning and launching take it a part of the rest.
_SHARE = 0.5
# The shortest of so many steps counts: launching late makes the GPU wait, launching early only a request.
_NUM_STEPS = 8


class LaunchTime:
    """Used by the engine thread alone."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_NUM_STEPS)

    def observe(self, seconds: float) -> None:
        """Learn what a step took."""
        self._latest.append(seconds)

    def wait_s(self, step_s: float) -> float:
        """Return how many seconds of the running step to let pass; 0 until enough steps were seen.

        ``step_s``: what such a step should take.
        """
        if len(self._latest) < _NUM_STEPS:
            return 0.0
        return _SHARE * min(step_s, *self._latest)
