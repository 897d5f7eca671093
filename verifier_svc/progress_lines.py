"""Print the progress of slow work to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PROGRESS_S = 1.0


class ProgressLines:
    """Print the progress of slow work to stderr.

    Prints at most one line in PROGRESS_S seconds, none for work that ends sooner, and always the
    end of work that it has printed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at = clock()
        # The work that the last line named, if it has not ended.
        self._open = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        now, has_ended = self._clock(), done >= total
        if now - self._shown_at >= PROGRESS_S or (has_ended and what == self._open):
            self._shown_at = now
            self._open = "" if has_ended else what
            # Work of one piece has no percentage before its end.
            percent = f" {done * 100 // max(total, 1)}%" if has_ended or total > 1 else ""
            print(f"verifier: {what}{percent}", file=sys.stderr, flush=True)
