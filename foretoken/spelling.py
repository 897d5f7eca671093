"""Say which known name a mistyped one resembles."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that resembles ``word`` most; None where nothing is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question, after a full stop and a space; empty where nothing is similar."""
    found = nearest(word, known)
    return f". Did you mean {found!r}?" if found is not None else ""
