"""When the tokens of one output arrived."""

from __future__ import annotations

import time
from collections.abc import Callable

# Called with the seconds since an output's last tokens and the number of tokens that came.
StepObserver = Callable[[float, int], None]


class TokenTimes:
    """Times of the first and the last token, by ``time.monotonic()``; 0.0 before the first."""

    def __init__(self, on_step: StepObserver) -> None:
        self.first_at = 0.0
        self.last_at = 0.0
        self._num_later_tokens = 0
        self._on_step = on_step

    @property
    def mean_gap_s(self) -> float | None:
        """Mean seconds between tokens; None before a second message of tokens.

        The first message is left out: it may bring several tokens at once.
        """
        count = self._num_later_tokens
        return (self.last_at - self.first_at) / count if count else None

    def record(self, num_tokens: int) -> None:
        """Record that tokens arrived now."""
        now = time.monotonic()
        if self.first_at:
            self._on_step(now - self.last_at, num_tokens)
            self._num_later_tokens += num_tokens
        else:
            self.first_at = now
        self.last_at = now
