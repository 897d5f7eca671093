"""Named texts that a drafter may draft from for every sequence, changed while it drafts.

Operators add them; no request does. Who holds them, and how, is the drafter's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foretoken.tree import Int32


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """One corpus; ``num_tokens`` counts all of its texts."""

    name: str
    num_tokens: int


class Corpora(Protocol):
    """The corpora of one drafter. Safe from any thread."""

    def add(self, name: str, token_ids: Int32, *, append: bool = False) -> CorpusInfo:
        """Draft from a text from now on: as all of the corpus ``name``, or beside what it holds already.

        Raises PreconditionError where it does not fit beside the others; then nothing has changed.
        """
        ...

    def remove(self, name: str) -> None:
        """Draft from a corpus no more and give its memory back. Raises NotFoundError for an unknown one."""
        ...

    def list(self) -> tuple[CorpusInfo, ...]:
        """All corpora, in the order in which they were added."""
        ...


@runtime_checkable
class HoldsCorpora(Protocol):
    """A ``foretoken.drafting.Drafter`` that can draft from corpora."""

    @property
    def corpora(self) -> Corpora: ...
