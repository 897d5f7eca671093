"""Define corpora: named texts that a drafter drafts from for every sequence.

Operators, not requests, add them while the drafter runs. The drafter decides how to store them.
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
    """The corpora of one drafter. Any thread may call it."""

    def add(self, name: str, token_ids: Int32, *, append: bool = False) -> CorpusInfo:
        """Draft from a text from now on; it replaces the corpus ``name``, or is appended to it.

        Raises PreconditionError, and changes nothing, if it does not fit beside the other corpora.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a corpus and free its memory. Raises NotFoundError for an unknown corpus."""
        ...

    def list(self) -> tuple[CorpusInfo, ...]:
        """Return all corpora in the order in which they were added."""
        ...


def token_bytes(token_ids: Sequence[int] | Int32) -> bytes:
    """Return token ids in wire format.

    Raises InvalidRequestError for ids that no vocabulary has.
    """
    values = np.asarray(token_ids, np.int64)
    if len(values) and not 0 <= values.min() <= values.max() <= _MOST:
        raise InvalidRequestError(f"token_ids: a token id is not in [0, {_MOST}]", field="token_ids")
    return values.astype("<u4").tobytes()


def token_ids_from(data: bytes, vocab_size: int = _MOST + 1) -> Int32:
    """Return token ids from wire format. Raises InvalidRequestError for too many or unknown ids."""
    if len(data) % 4 or len(data) // 4 > MAX_CORPUS_TOKENS:
        raise InvalidRequestError(f"token_ids must be 1 to {MAX_CORPUS_TOKENS} ids of four bytes", field="token_ids")
    values = np.frombuffer(data, "<u4")
    if len(values) and values.max() >= vocab_size:
        raise InvalidRequestError(f"token_ids: token id {values.max()} is not in [0, {vocab_size})", field="token_ids")
    return values.astype(np.int32)


@runtime_checkable
class HoldsCorpora(Protocol):
    """A ``foretoken.drafter.Drafter`` that drafts from corpora."""

    @property
    def corpora(self) -> Corpora: ...
