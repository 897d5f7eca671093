"""Allocate KV blocks: count references, find prefixes by chained hashes, evict. Holds no tensors.

A block is *referenced* by one or more tables, *cached* (unreferenced, but its content has a known
hash and can be found again), or *empty*. A free block is an unreferenced one. The manager hands out
empty blocks first, then the cached blocks that were released longest ago. It hashes only full
blocks, and nobody writes to a hashed block again, so sharing needs no copies.

Sequences that compute the same tokens at the same time leave several blocks with one content. All
of them stay findable while they are referenced, so that the end of one sequence does not hide the
blocks that follow in another. Of unreferenced copies, the manager keeps one.

Call ``can_reserve`` before ``reserve``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from verifier_svc.scheduling.cache_events import CacheEvents

# Bytes of a block hash: 128 bits of SHA-256. Two prefixes with one hash would read each other's
# cache.
HASH_BYTES = 16


@dataclass(slots=True, eq=False)
class BlockTable:
    """One sequence's blocks in logical order, and the state of its hash chain.

    The table references each of its blocks once.

    Attributes:
        num_cached_tokens: tokens at the front that were in the prefix cache when the table was
            made.
        num_hashed: blocks at the front whose hash is known.
        chain_hash: hash of block ``num_hashed - 1``; the salt's hash if no block is hashed.
        salt: the tenant's salt.
    """

    chain_hash: bytes
    salt: str | None = None
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_hashed: int = 0
    is_free: bool = False


class BlockManager:
    """The only allocator of ``num_blocks`` blocks with ``block_size`` KV slots each.

    Block ids are [0, num_blocks). Only one thread uses it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        events: CacheEvents | None = None,
    ) -> None:
        """``events``: records which blocks can be found. None: nobody wants to know."""
        assert num_blocks >= 1 and block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.events = events
        self._ref_counts = [0] * num_blocks
        # Hash by findable block, and blocks by hash: several blocks only while all are referenced.
        self._hashes: dict[int, bytes] = {}
        self._blocks_of_hash: dict[bytes, list[int]] = {}
        # Free blocks: the empty ones (a stack), and the cached ones (released longest ago first).
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks no table references, including cached ones."""
        return len(self._empty) + len(self._cached)

    def match_prefix(self, token_ids: Sequence[int], salt: str | None) -> BlockTable:
        """Return a new table that references the longest cached prefix of the tokens for this salt.

        The prefix may be empty. It leaves out at least one token, since the last token must run to
        give logits.
        """
        table = BlockTable(_salt_hash(salt), salt)
        if self.enable_prefix_cache:
            for index in range((len(token_ids) - 1) // self.block_size):
                chain_hash = self._chain(table.chain_hash, token_ids, index)
                if chain_hash not in self._blocks_of_hash:
                    break
                block_id = self._blocks_of_hash[chain_hash][0]
                self._acquire(block_id)
                table.block_ids.append(block_id)
                table.chain_hash = chain_hash
        table.num_hashed = len(table.block_ids)
        table.num_cached_tokens = table.num_hashed * self.block_size
        return table

    def can_allocate(self, num_blocks: int) -> bool:
        """Return whether ``num_blocks`` blocks are free."""
        return num_blocks <= self.num_free_blocks

    def can_reserve(self, table: BlockTable, num_kv_slots: int) -> bool:
        """Return whether the table can grow to ``num_kv_slots`` KV slots in total."""
        return self.can_allocate(self._num_missing(table, num_kv_slots))

    def reserve(self, table: BlockTable, num_kv_slots: int) -> None:
        """Grow the table to ``num_kv_slots`` KV slots in total; never shrink it.

        Raises:
            ValueError: the table was freed, or too few blocks are free (``can_reserve`` is false).
        """
        _check_in_use(table)
        num_missing = self._num_missing(table, num_kv_slots)
        if not self.can_allocate(num_missing):
            raise ValueError(f"{num_missing} blocks wanted, {self.num_free_blocks} are free")
        for _ in range(num_missing):
            table.block_ids.append(self._take_free())

    def hash_full_blocks(self, table: BlockTable, token_ids: Sequence[int], num_written: int) -> None:
        """Make the table's full blocks findable.

        Args:
            token_ids: the sequence's committed tokens. Tokens hashed before must not have changed.
            num_written: tokens at the front whose KV entries are written.

        Raises:
            ValueError: the table was freed, or its blocks cannot hold ``num_written`` tokens.
        """
        _check_in_use(table)
        if not self.enable_prefix_cache:
            return
        if num_written > min(len(token_ids), len(table.block_ids) * self.block_size):
            raise ValueError(f"{num_written} tokens cannot be in the table's blocks")
        while (table.num_hashed + 1) * self.block_size <= num_written:
            index, parent = table.num_hashed, table.chain_hash
            table.chain_hash = self._chain(parent, token_ids, index)
            is_new = self._make_findable(table.block_ids[index], table.chain_hash)
            if is_new and self.events is not None:
                tokens = list(token_ids[index * self.block_size : (index + 1) * self.block_size])
                self.events.stored(table.chain_hash, parent if index else None, tokens, table.salt)
            table.num_hashed += 1

    def forget(self, table: BlockTable) -> None:
        """Make the table's blocks unfindable, even if other tables reference them too."""
        _check_in_use(table)
        for block_id in table.block_ids:
            if block_id in self._hashes:
                self._forget(block_id)

    def flush(self) -> int:
        """Empty the cached blocks; return how many there were."""
        num_blocks = len(self._cached)
        while self._cached:
            block_id, _ = self._cached.popitem()
            self._forget(block_id)
            self._empty.append(block_id)
        if num_blocks and not self._hashes and self.events is not None:
            self.events.cleared()
        return num_blocks

    def free(self, table: BlockTable) -> None:
        """Free the table and drop its references. Hashed blocks stay findable.

        Raises ValueError if the table was freed before.
        """
        _check_in_use(table)
        table.is_free = True
        # Release the last block first: later blocks are useless without their prefix, so evict them
        # first.
        for block_id in reversed(table.block_ids):
            self._release(block_id)
        table.block_ids = []

    def _num_missing(self, table: BlockTable, num_kv_slots: int) -> int:
        return max(-(-num_kv_slots // self.block_size) - len(table.block_ids), 0)

    def _chain(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        """Return the hash of block ``index`` after the blocks whose chain hash is ``parent``."""
        block = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hashlib.sha256(parent + array("I", block).tobytes()).digest()[:HASH_BYTES]

    def _acquire(self, block_id: int) -> None:
        """Add a reference to a block that a prefix lookup found."""
        if self._ref_counts[block_id] == 0:
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def _make_findable(self, block_id: int, chain_hash: bytes) -> bool:
        """Record the hash of a referenced block that is now full; drop an unreferenced copy.

        Returns whether no other block had this content.
        """
        block_ids = self._blocks_of_hash.setdefault(chain_hash, [])
        is_new = not block_ids
        if block_ids and self._ref_counts[block_ids[0]] == 0:
            copy = block_ids[0]
            del self._cached[copy], self._hashes[copy]
            block_ids.clear()
            self._empty.append(copy)
        block_ids.append(block_id)
        self._hashes[block_id] = chain_hash
        return is_new

    def _forget(self, block_id: int) -> None:
        """Make a block's content unfindable."""
        chain_hash = self._hashes.pop(block_id)
        self._blocks_of_hash[chain_hash].remove(block_id)
        if not self._blocks_of_hash[chain_hash]:
            del self._blocks_of_hash[chain_hash]
            if self.events is not None:
                self.events.removed(chain_hash)

    def _take_free(self) -> int:
        if self._empty:
            block_id = self._empty.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"block {block_id} is freed twice")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        if block_id in self._hashes and len(self._blocks_of_hash[self._hashes[block_id]]) > 1:
            self._forget(block_id)
        if block_id in self._hashes:
            self._cached[block_id] = None
        else:
            self._empty.append(block_id)


def _check_in_use(table: BlockTable) -> None:
    if table.is_free:
        raise ValueError("this table was freed before")


def _salt_hash(salt: str | None) -> bytes:
    """Return the hash that starts a tenant's chains. No salt and the empty salt are two tenants."""
    tagged = b"default" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(tagged).digest()[:HASH_BYTES]
