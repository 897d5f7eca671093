"""The block manager: literal cases, then random histories against a model made of dictionaries."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tests.support.block_books import check_blocks, num_cached_blocks, ref_count
from verifier_svc.scheduling.block_manager import BlockManager, BlockTable

TEN = list(range(10))


def written(manager: BlockManager, tokens: list[int], salt: str | None = None) -> BlockTable:
    """Return a table that holds these tokens, all of them computed."""
    table = manager.match_prefix(tokens, salt)
    manager.reserve(table, len(tokens))
    manager.hash_full_blocks(table, tokens, len(tokens))
    return table


def num_found(manager: BlockManager, tokens: list[int], salt: str | None = None) -> int:
    """Return how many blocks the cache has for these tokens, without keeping them."""
    table = manager.match_prefix(tokens, salt)
    found = len(table.block_ids)
    manager.free(table)
    return found


def test_reserving_takes_as_many_blocks_as_the_kv_slots_need():
    manager = BlockManager(4, 4)
    table = manager.match_prefix([1, 2], None)
    assert (table.block_ids, manager.num_free_blocks) == ([], 4)
    for num_kv_slots, num_blocks in ((1, 1), (4, 1), (5, 2), (3, 2), (16, 4)):
        assert manager.can_reserve(table, num_kv_slots)
        manager.reserve(table, num_kv_slots)
        assert len(table.block_ids) == num_blocks
    assert sorted(table.block_ids) == [0, 1, 2, 3]
    assert not manager.can_reserve(table, 17)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        manager.reserve(table, 17)
    manager.free(table)
    assert manager.num_free_blocks == 4


def test_predicates_count_free_blocks():
    manager = BlockManager(3, 4)
    assert manager.can_allocate(3) and not manager.can_allocate(4)
    written(manager, TEN[:5])
    assert manager.can_allocate(1) and not manager.can_allocate(2)


def test_a_prefix_is_found_in_full_blocks_and_shared():
    manager = BlockManager(8, 4)
    first = written(manager, TEN)  # two full blocks and one of two tokens
    second = manager.match_prefix(TEN, None)
    assert second.block_ids == first.block_ids[:2]
    assert (second.num_cached_tokens, second.num_hashed) == (8, 2)
    assert [ref_count(manager, block) for block in first.block_ids] == [2, 2, 1]
    manager.free(first)
    assert [ref_count(manager, block) for block in second.block_ids] == [1, 1]
    check_blocks(manager)


def test_the_last_token_is_never_cached():
    manager = BlockManager(8, 4)
    manager.free(written(manager, TEN[:8]))
    assert num_found(manager, TEN[:8]) == 1, "the second block would leave nothing to run"
    assert num_found(manager, TEN[:9]) == 2
    assert num_found(manager, TEN[:4]) == num_found(manager, []) == 0


def test_a_block_is_found_only_after_its_own_prefix():
    manager = BlockManager(8, 4)
    manager.free(written(manager, [1, 1, 1, 1, 2, 2, 2, 2, 0]))
    assert num_found(manager, [2, 2, 2, 2, 0]) == 0
    assert num_found(manager, [1, 1, 1, 1, 3, 3, 3, 3, 0]) == 1
    assert num_found(manager, [1, 1, 1, 1, 2, 2, 2, 2, 0]) == 2


def test_prefixes_do_not_cross_salts():
    manager = BlockManager(8, 4)
    manager.free(written(manager, TEN, "alice"))
    assert num_found(manager, TEN, "alice") == 2
    for other in ("bob", "", None, "alice "):
        assert num_found(manager, TEN, other) == 0
    manager.free(written(manager, TEN, None))
    assert num_found(manager, TEN, None) == 2
    assert num_found(manager, TEN, "") == num_found(manager, TEN, "default") == 0, "no salt is no text"


def test_token_ids_are_hashed_whole():
    manager = BlockManager(4, 2)
    manager.free(written(manager, [256, 1, 0]))
    assert num_found(manager, [1, 256, 0]) == num_found(manager, [65536, 1, 0]) == num_found(manager, [0, 1, 0]) == 0
    assert num_found(manager, [256, 1, 0]) == 1


def test_only_written_blocks_are_found():
    manager = BlockManager(8, 4)
    table = manager.match_prefix(TEN, None)
    manager.reserve(table, 10)
    manager.hash_full_blocks(table, TEN, 7)
    assert num_found(manager, TEN) == 1
    manager.hash_full_blocks(table, TEN, 8)
    assert num_found(manager, TEN) == 2
    with pytest.raises(ValueError, match="13 tokens"):
        manager.hash_full_blocks(table, list(range(20)), 13)


def test_a_block_that_grows_full_token_by_token_has_the_same_hash():
    manager = BlockManager(8, 4)
    table = manager.match_prefix(TEN[:1], None)
    for length in range(1, 10):
        manager.reserve(table, length)
        manager.hash_full_blocks(table, TEN[:length], length)
    manager.free(table)
    assert num_found(manager, TEN) == 2


def side_by_side(manager: BlockManager) -> tuple[BlockTable, BlockTable]:
    """Return two tables of the same ten tokens; neither found a block of the other."""
    tables = manager.match_prefix(TEN, None), manager.match_prefix(TEN, None)
    for table in tables:
        manager.reserve(table, 10)
        manager.hash_full_blocks(table, TEN, 10)
    assert not set(tables[0].block_ids) & set(tables[1].block_ids)
    return tables


def test_of_blocks_computed_twice_one_copy_stays_cached():
    manager = BlockManager(8, 4)
    first, second = side_by_side(manager)
    third = manager.match_prefix(TEN, None)
    assert third.block_ids == first.block_ids[:2]
    for table in (first, third, second):
        manager.free(table)
        check_blocks(manager)
    assert (manager.num_free_blocks, num_cached_blocks(manager)) == (8, 2)
    assert num_found(manager, TEN) == 2


def test_the_end_of_one_copy_does_not_hide_the_other():
    manager = BlockManager(6, 4)
    first, second = side_by_side(manager)
    manager.free(first)
    written(manager, [7] * 12)  # takes all that is free
    assert manager.num_free_blocks == 0
    assert manager.match_prefix(TEN, None).block_ids == second.block_ids[:2]


def test_a_cached_block_gives_way_to_a_running_one_of_the_same_content():
    manager = BlockManager(8, 4)
    late = manager.match_prefix(TEN[:4], None)
    manager.reserve(late, 4)
    early = written(manager, TEN[:5])
    manager.free(early)
    assert num_cached_blocks(manager) == 1
    manager.hash_full_blocks(late, TEN[:4], 4)
    assert (num_cached_blocks(manager), manager.num_free_blocks) == (0, 7)
    assert manager.match_prefix(TEN, None).block_ids == late.block_ids
    check_blocks(manager)


def test_freed_blocks_are_revived_by_a_prefix():
    manager = BlockManager(3, 4)
    table = written(manager, TEN)
    blocks = table.block_ids[:2]
    manager.free(table)
    assert (manager.num_free_blocks, num_cached_blocks(manager)) == (3, 2)
    again = manager.match_prefix(TEN, None)
    assert again.block_ids == blocks
    assert (manager.num_free_blocks, num_cached_blocks(manager)) == (1, 0)


def test_empty_blocks_go_first_then_the_longest_released_ends_first():
    manager = BlockManager(6, 2)
    old, young = [1, 1, 2, 2, 0], [3, 3, 4, 4, 0]
    manager.free(written(manager, old))
    manager.free(written(manager, young))
    assert (manager.num_free_blocks, num_cached_blocks(manager)) == (6, 4)
    taker = manager.match_prefix([], None)
    found = []
    for num_blocks in range(1, 7):
        manager.reserve(taker, 2 * num_blocks)
        found.append((num_found(manager, old), num_found(manager, young)))
    # Looking releases the blocks that it found at once: `young` is looked at last, so it stays the
    # youngest.
    assert found == [(2, 2), (2, 2), (1, 2), (0, 2), (0, 1), (0, 0)]
    check_blocks(manager)


def test_an_evicted_block_is_not_found_under_its_old_hash():
    manager = BlockManager(1, 2)
    manager.free(written(manager, [1, 1]))
    manager.free(written(manager, [2, 2]))
    assert num_found(manager, [1, 1, 0]) == 0
    assert num_found(manager, [2, 2, 0]) == 1


def test_freeing_twice_is_an_error():
    manager = BlockManager(4, 4)
    table = written(manager, TEN)
    manager.free(table)
    for action in (
        lambda: manager.free(table),
        lambda: manager.reserve(table, 4),
        lambda: manager.hash_full_blocks(table, TEN, 4),
    ):
        with pytest.raises(ValueError, match="freed before"):
            action()
    assert manager.num_free_blocks == 4


def test_a_block_freed_through_another_table_is_an_error():
    manager = BlockManager(4, 4)
    table = written(manager, TEN[:3])
    thief = BlockTable(b"", block_ids=list(table.block_ids))
    manager.free(thief)
    with pytest.raises(ValueError, match="block 0 is freed twice"):
        manager.free(table)


@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda m: m._empty.append(m._empty[0]), "free twice"),
        (lambda m: m._empty.pop(), "lost"),
        (lambda m: m._ref_counts.__setitem__(m._empty[0], 1), "referenced block is free"),
        (lambda m: m._hashes.clear(), "hashes disagree"),
        (lambda m: m._hashes.update({m._empty[0]: b"x"}) or m._blocks_of_hash.update({b"x": m._empty[:1]}), "empty"),
    ],
)
def test_the_integrity_check_finds_damage(damage, complaint):
    manager = BlockManager(6, 4)
    written(manager, TEN)
    check_blocks(manager)
    damage(manager)
    with pytest.raises(AssertionError, match=complaint):
        check_blocks(manager)


def test_without_prefix_cache_nothing_is_found():
    manager = BlockManager(4, 4, enable_prefix_cache=False)
    manager.free(written(manager, TEN))
    assert num_found(manager, TEN) == 0
    assert (manager.num_free_blocks, num_cached_blocks(manager)) == (4, 0)


# --- Random histories.


BLOCK_SIZE = 2
NUM_BLOCKS = 9
SALTS = st.sampled_from([None, "a"])
# Two token values make shared prefixes common.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class Owner:
    """The model's view of one running sequence."""

    def __init__(self, table: BlockTable, salt: str | None, tokens: list[int]) -> None:
        self.table = table
        self.salt = salt
        self.tokens = tokens
        self.num_written = table.num_cached_tokens


class BlockManagerHistory(RuleBasedStateMachine):
    """Sequences come, share prefixes, grow, hash and go.

    The model knows the content of every findable block.
    """

    owners = Bundle("owners")
    spent = Bundle("spent")

    @initialize()
    def start(self) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.running: list[Owner] = []
        # Contents of fully written blocks: (salt, all tokens from the start to the block's end).
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    @rule(target=owners, tokens=TOKENS, salt=SALTS)
    def admit(self, tokens: list[int], salt: str | None):
        manager = self.manager
        free = manager.num_free_blocks
        table = manager.match_prefix(tokens, salt)
        assert table.num_cached_tokens == len(table.block_ids) * BLOCK_SIZE < len(tokens)
        for index, block_id in enumerate(table.block_ids):
            prefix = tuple(tokens[: (index + 1) * BLOCK_SIZE])
            assert self.content[block_id] == (salt, prefix), "a block of other content was found"
        if not manager.can_reserve(table, len(tokens)):
            manager.free(table)
            assert manager.num_free_blocks == free
            return multiple()
        manager.reserve(table, len(tokens))
        self._forget(table.block_ids[table.num_hashed :])
        owner = Owner(table, salt, tokens)
        self.running.append(owner)
        return owner

    @rule(owner=owners, tokens=TOKENS)
    def append(self, owner: Owner, tokens: list[int]) -> None:
        known = list(owner.table.block_ids)
        length = len(owner.tokens) + len(tokens)
        fits = -(-length // BLOCK_SIZE) - len(known) <= self.manager.num_free_blocks
        assert self.manager.can_reserve(owner.table, length) == fits
        if not fits:
            with pytest.raises(ValueError):
                self.manager.reserve(owner.table, length)
            assert owner.table.block_ids == known
            return
        self.manager.reserve(owner.table, length)
        assert owner.table.block_ids[: len(known)] == known
        self._forget(owner.table.block_ids[len(known) :])
        owner.tokens = owner.tokens + tokens

    @rule(owner=owners, share=st.floats(0, 1))
    def compute(self, owner: Owner, share: float) -> None:
        owner.num_written += round(share * (len(owner.tokens) - owner.num_written))
        self.manager.hash_full_blocks(owner.table, owner.tokens, owner.num_written)
        for index in range(owner.num_written // BLOCK_SIZE):
            prefix = tuple(owner.tokens[: (index + 1) * BLOCK_SIZE])
            content = (owner.salt, prefix)
            assert self.content.setdefault(owner.table.block_ids[index], content) == content, "a shared block changed"
        assert owner.table.num_hashed == owner.num_written // BLOCK_SIZE
        again = self.manager.match_prefix([*owner.tokens[: owner.num_written], 9], owner.salt)
        assert len(again.block_ids) == owner.num_written // BLOCK_SIZE, "what is held and hashed is found"
        self.manager.free(again)

    @rule(target=spent, owner=consumes(owners))
    def end(self, owner: Owner):
        self.running.remove(owner)
        self.manager.free(owner.table)
        return owner

    @rule(owner=spent)
    def end_again(self, owner: Owner) -> None:
        with pytest.raises(ValueError):
            self.manager.free(owner.table)

    def _forget(self, block_ids: list[int]) -> None:
        """Check blocks handed out as new: they hold nothing, and nobody else has them."""
        for block_id in block_ids:
            self.content.pop(block_id, None)
            assert ref_count(self.manager, block_id) == 1

    @invariant()
    def books_agree(self) -> None:
        manager = self.manager
        check_blocks(manager)
        references = Counter(block_id for owner in self.running for block_id in owner.table.block_ids)
        assert [ref_count(manager, block_id) for block_id in range(NUM_BLOCKS)] == [
            references[block_id] for block_id in range(NUM_BLOCKS)
        ]
        assert manager.num_free_blocks == NUM_BLOCKS - len(references)
        for owner in self.running:
            assert len(set(owner.table.block_ids)) == len(owner.table.block_ids)
            for block_id in owner.table.block_ids[owner.table.num_hashed :]:
                assert references[block_id] == 1, "a block that is still written is shared"

    def teardown(self) -> None:
        for owner in self.running:
            self.manager.free(owner.table)
        assert self.manager.num_free_blocks == NUM_BLOCKS
        check_blocks(self.manager)


TestBlockManagerHistory = BlockManagerHistory.TestCase
TestBlockManagerHistory.settings = settings(max_examples=200, stateful_step_count=40)


def test_a_flush_forgets_what_no_table_references():
    manager = BlockManager(8, 4)
    tokens = list(range(9))
    manager.free(written(manager, tokens))
    kept = written(manager, [50, 51, 52, 53, 54])
    assert num_found(manager, tokens) == 2
    assert manager.flush() == 2
    assert (num_found(manager, tokens), num_found(manager, [50, 51, 52, 53, 54])) == (0, 1)
    assert manager.flush() == 0
    check_blocks(manager)
    manager.free(kept)
    assert manager.num_free_blocks == 8
