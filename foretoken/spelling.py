"""Say which known name a mistyped one resembles."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question, after a full stop and a space; empty where nothing is similar."""
    found = get_close_matches(word, list(known), n=1)
    return f". Did you mean {found[0]!r}?" if found else ""
