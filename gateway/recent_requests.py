"""Remember the figures of recently ended requests for the operator.

They have no text, and of a key only its name.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

KEPT_S = 900.0
MOST_KEPT = 200


class RecentRequests:
    """Keeps the last MOST_KEPT requests of one process, each for KEPT_S seconds."""

    def __init__(self) -> None:
        self._ended: deque[dict[str, Any]] = deque(maxlen=MOST_KEPT)

    def add(self, figures: dict[str, Any]) -> None:
        """Remember a request that ended now."""
        self._ended.append({"ended_at": time.time(), **figures})

    def latest(self) -> list[dict[str, Any]]:
        """Return what is remembered, the latest first; ``ended_at`` is in Unix seconds."""
        oldest = time.time() - KEPT_S
        return [figures for figures in reversed(self._ended) if figures["ended_at"] >= oldest]
