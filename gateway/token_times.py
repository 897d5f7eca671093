"""When the tokens of one output arrived."""

from __future__ import annotations

import time
from typing import Protocol


class TokenObserver(Protocol):
    """Learns of an output's tokens as they arrive."""

    def first_token_arrived(self, seconds: float) -> None:
        """Record an output's first token, ``seconds`` after its request."""
        ...

    def tokens_arrived(self, seconds: float, num_tokens: int) -> None:
        """Record later tokens of an output, ``seconds`` after its last ones."""
        ...


class TokenTimes:
    """Times of the first and the last token, by ``time.monotonic()``; 0.0 before the first."""

    def __init__(self, started_at: float, observer: TokenObserver) -> None:
        """``started_at``: when the request came, by ``time.monotonic()``."""
        self.first_at = 0.0
        self.last_at = 0.0
        self._started_at = started_at
        self._num_later_tokens = 0
        self._observer = observer

    @property
    def to_first_s(self) -> float | None:
        """Seconds from the request to the first token; None before it."""
        return self.first_at - self._started_at if self.first_at else None

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
            self._observer.tokens_arrived(now - self.last_at, num_tokens)
            self._num_later_tokens += num_tokens
        else:
            self.first_at = now
            self._observer.first_token_arrived(now - self._started_at)
        self.last_at = now
