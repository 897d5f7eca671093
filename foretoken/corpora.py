"""Named texts that a drafter may draft from for every sequence, changed while it drafts.

Operators add them; no request does. Who holds them, and how, is the drafter's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from foretoken.errors import InvalidRequestError
from foretoken.limits import MAX_CORPUS_TOKENS
from foretoken.tree import Int32

_MOST = 2**31 - 1


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


def token_bytes(token_ids: Sequence[int] | Int32) -> bytes:
    """Token ids as they stand on the wire. Raises InvalidRequestError for one that no vocabulary holds."""
    values = np.asarray(token_ids, np.int64)
    if len(values) and not 0 <= values.min() <= values.max() <= _MOST:
        raise InvalidRequestError(f"token_ids: a token id is not in [0, {_MOST}]", field="token_ids")
    return values.astype("<u4").tobytes()


def token_ids_from(data: bytes, vocab_size: int = _MOST + 1) -> Int32:
    """Token ids from the wire. Raises InvalidRequestError for too many, or for one outside of the vocabulary."""
    if len(data) % 4 or len(data) // 4 > MAX_CORPUS_TOKENS:
        raise InvalidRequestError(f"token_ids must be 1 to {MAX_CORPUS_TOKENS} ids of four bytes", field="token_ids")
    values = np.frombuffer(data, "<u4")
    if len(values) and values.max() >= vocab_size:
        raise InvalidRequestError(f"token_ids: token id {values.max()} is not in [0, {vocab_size})", field="token_ids")
    return values.astype(np.int32)


@runtime_checkable
class HoldsCorpora(Protocol):
    """A ``foretoken.drafter.Drafter`` that can draft from corpora."""

    @property
    def corpora(self) -> Corpora: ...
