"""What one user of a load sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.bench.client import COMPLETIONS


@dataclass(frozen=True, slots=True)
class UserStream:
    """One user's request bodies; the first is sent ``starts_after`` seconds after the start.

    ``group`` is a label that its answers keep.

    Attributes:
        path: where the bodies are posted.
        is_conversation: the bodies' ``messages`` follow each other, with the server's answers
            between them.
    """

    bodies: tuple[dict[str, Any], ...]
    starts_after: float = 0.0
    group: str = ""
    path: str = COMPLETIONS
    is_conversation: bool = False
