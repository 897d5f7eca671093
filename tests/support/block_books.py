"""What tests read in a block manager's books, and a check that the books agree."""

from __future__ import annotations

from verifier_svc.scheduling.block_manager import BlockManager


def num_cached_blocks(manager: BlockManager) -> int:
    """Return how many free blocks a prefix lookup can still find."""
    return len(manager._cached)


def ref_count(manager: BlockManager, block_id: int) -> int:
    """Return how many tables reference a block."""
    return manager._ref_counts[block_id]


def check_blocks(manager: BlockManager) -> None:
    """Raise AssertionError if the records contradict each other."""
    free = [*manager._empty, *manager._cached]
    assert len(free) == len(set(free)), "a block is free twice"
    referenced = {block_id for block_id, count in enumerate(manager._ref_counts) if count}
    assert all(count >= 0 for count in manager._ref_counts), "a reference count is negative"
    assert referenced.isdisjoint(free), "a referenced block is free"
    assert len(referenced) + len(free) == manager.num_blocks, "a block is lost"
    found = [(block_id, chain) for chain, block_ids in manager._blocks_of_hash.items() for block_id in block_ids]
    assert sorted(found) == sorted(manager._hashes.items()), "hashes disagree"
    copies = [block_ids for block_ids in manager._blocks_of_hash.values() if len(block_ids) != 1]
    assert all(block_ids and referenced.issuperset(block_ids) for block_ids in copies), "a free block has a copy"
    assert manager._hashes.keys().isdisjoint(manager._empty), "an empty block has a hash"
    assert manager._hashes.keys() >= manager._cached.keys(), "a cached block has no hash"


def found_hashes(manager: BlockManager) -> set[bytes]:
    """Return the hashes of all blocks that a prefix lookup can find."""
    return set(manager._blocks_of_hash)
