"""Record how the prefix cache changes: which blocks can be found, and which no longer can.

A block's content is *stored* when the first block with it becomes findable, and *removed* when the
last one is forgotten, so each event changes the set of known prefixes by what it names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlocksStored:
    """Blocks that follow one another and became findable.

    Attributes:
        parent: hash of the block before the first one; None if it starts its chain.
        token_ids: the blocks' tokens, one after the other.
        salt: the tenant's salt, if ``parent`` is None. Later blocks have it by their parent.
    """

    parent: bytes | None
    salt: str | None
    hashes: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that can no longer be found."""

    hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class CacheCleared:
    """The cache holds nothing any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheEvents:
    """Collects the changes of a step. Only the engine thread uses it."""

    def __init__(self, sink: Callable[[list[CacheEvent]], None]) -> None:
        """``sink``: takes the changes of a step, in order."""
        self._sink = sink
        self._pending: list[CacheEvent] = []

    def stored(self, chain_hash: bytes, parent: bytes | None, token_ids: list[int], salt: str | None) -> None:
        """Record one block that became findable; ``parent`` as in BlocksStored."""
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, BlocksStored) or parent is None or last.hashes[-1] != parent:
            last = BlocksStored(parent, salt if parent is None else None)
            self._pending.append(last)
        last.hashes.append(chain_hash)
        last.token_ids += token_ids

    def removed(self, chain_hash: bytes) -> None:
        """Record one block that can no longer be found."""
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, BlocksRemoved):
            last = BlocksRemoved()
            self._pending.append(last)
        last.hashes.append(chain_hash)

    def cleared(self) -> None:
        """Record that the cache is empty. Changes before that no longer matter."""
        self._pending = [CacheCleared()]

    def publish(self) -> None:
        """Give the changes since the last call to the sink, if there are any."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._sink(pending)
