"""Rows, valid ranges and trees of drafters with a cache, against plain references."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from drafter_svc.trees import passes as draft_passes
from drafter_svc.trees.host_growth import HostGrowth
from drafter_svc.trees.passes import COUPLING_SCALE, DraftPasses
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DraftBatch
from tests.support.paged_draft import (
    BLOCK,
    VOCAB,
    DigestModel,
    Row,
    reference_tree,
    request_of,
    some_tokens,
    target_info,
)


class Drafting:
    """Passes over a digest model, and the verifier's side of the requests."""

    def __init__(
        self,
        *,
        num_depths: int = 1,
        hidden: bool = True,
        coupled: bool = True,
        budget: int | None = None,
        target_ids: np.ndarray | None = None,
        **target: Any,
    ) -> None:
        info = target_info(**target)
        self.num_depths, self.hidden = num_depths, hidden
        self.scale = COUPLING_SCALE if coupled else 0.0
        self.target_ids = target_ids
        self.model = DigestModel(num_depths, reads_hidden=hidden, target_ids=target_ids)
        self.rows = DraftRows(info, first_position=int(hidden), num_depths=num_depths, needs_hidden=hidden)
        growth = partial(HostGrowth, self.model, info)
        self.passes = DraftPasses(self.model, info, self.rows, make_growth=growth, coupled=coupled, budget=budget)

    def draft(self, *rows: Row) -> DraftBatch:
        return self.passes.draft(request_of(rows, with_hidden=self.hidden))

    def expect_tree(self, batch: DraftBatch, index: int, row: Row, valid_start: int) -> None:
        expected = reference_tree(
            row,
            valid_start,
            num_depths=self.num_depths,
            with_hidden=self.hidden,
            scale=self.scale,
            target_ids=self.target_ids,
        )
        low, high = batch.node_starts[index], batch.node_starts[index + 1]
        assert (batch.tokens[low:high].tolist(), batch.parents[low:high].tolist()) == expected[:2]
        np.testing.assert_allclose(batch.scores[low:high], expected[2], rtol=1e-4, atol=1e-4)

    def check(self, valid_start: int, row: Row) -> None:
        """Draft for one row; the tree must fit the valid range that begins at ``valid_start``."""
        self.expect_tree(self.draft(row), 0, row, valid_start)

    def check_undrafted(self, row: Row) -> None:
        batch = self.draft(row)
        assert batch.tokens.tolist() == [row.tokens[-1]]
        assert batch.parents.tolist() == [-1]


KINDS: dict[str, dict[str, Any]] = {
    "head": {},
    "draft model": {"hidden": False},
    "two modules": {"num_depths": 2},
    "three modules": {"num_depths": 3},
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
BLOCKS = [5, 2, 9, 0, 7, 11, 3, 1]


@ALL_KINDS
@pytest.mark.parametrize("shape", [(8, 3, 3), (2, 1, 1), (16, 15, 1), (16, 5, 4), (5, 9, 2), (16, 2, 15), (3, 2, 9)])
def test_trees_of_a_growing_sequence(kind: dict[str, Any], shape: tuple[int, int, int]) -> None:
    drafting = Drafting(**kind)
    tokens, length = some_tokens(30), 0
    for new in (6, 1, 3, 4, 2, 5):
        length += new
        row = Row(tokens[:length], new, BLOCKS, max_nodes=shape[0], max_depth=shape[1], max_branches=shape[2])
        drafting.check(int(drafting.hidden), row)


@ALL_KINDS
def test_rows_of_one_request_differ_in_shape_and_temperature(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    rows = [
        Row(some_tokens(9, 1), 9, [0, 1, 2], batch_slot=2, max_nodes=12, max_depth=4, max_branches=2),
        Row(some_tokens(5, 2), 5, [3, 4], batch_slot=0, max_nodes=1),
        Row(some_tokens(3, 3), 3, [5], batch_slot=1, temperature=0.8, seed=7, choice=3, max_nodes=16, max_branches=4),
        Row(some_tokens(14, 4), 14, [6, 7, 8, 9], batch_slot=3, max_nodes=4, max_depth=1),
    ]
    batch = drafting.draft(*rows)
    for index, row in enumerate(rows):
        if row.max_nodes == 1:
            assert batch.tree(index).tokens.tolist() == [row.tokens[-1]]
        else:
            drafting.expect_tree(batch, index, row, int(drafting.hidden))


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.6}],
)
def test_trees_at_a_temperature(sampling: dict[str, Any], coupled: bool) -> None:
    drafting = Drafting(coupled=coupled)
    row = Row(some_tokens(10), 10, BLOCKS, **({"temperature": 0.7, "seed": 2**63 + 5, "choice": 2} | sampling))
    drafting.check(1, row)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_reduced_vocabulary_is_drafted_by_target_ids(temperature: float) -> None:
    target_ids = np.random.default_rng(0).permutation(VOCAB)[:19].astype(np.int32)
    drafting = Drafting(target_ids=target_ids)
    drafting.check(1, Row(some_tokens(10), 10, BLOCKS, temperature=temperature, seed=3, max_nodes=16))


def test_a_beam_without_a_chance_is_not_run() -> None:
    drafting = Drafting()
    drafting.check(1, Row(some_tokens(10), 10, BLOCKS, max_nodes=2, max_depth=1, max_branches=8))
    assert len(drafting.model.pass_sizes) == 1
    drafting.check(1, Row(some_tokens(11), 1, BLOCKS, max_nodes=4, max_depth=3, max_branches=15))
    # 1 new KV entry, then at most 3 beams at each of two depths.
    assert sum(drafting.model.pass_sizes) <= 10 + 1 + 6


@ALL_KINDS
def test_a_long_prompt_takes_passes_of_bounded_size(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_passes, "PASS_ROWS", 16)
    drafting = Drafting(**kind)
    first = Row(some_tokens(37), 37, list(range(10)), max_depth=2)
    second = Row(some_tokens(30, 1), 30, list(range(10, 18)), batch_slot=1)
    batch = drafting.draft(first, second)
    start = int(drafting.hidden)
    drafting.expect_tree(batch, 0, first, start)
    drafting.expect_tree(batch, 1, second, start)
    assert drafting.passes.figures.extend_tokens == 67 - 2 * start
    assert max(drafting.model.pass_sizes) == 16


def test_entries_of_a_long_prompt_are_written_without_the_rest() -> None:
    """One pass takes all rows except each sequence's last; another takes the last rows."""
    drafting = Drafting()
    first = Row(some_tokens(37), 37, list(range(10)), max_depth=1)
    second = Row(some_tokens(30, 1), 30, list(range(10, 18)), batch_slot=1, max_nodes=1)
    third = Row(some_tokens(9, 2), 9, [20, 21, 22], batch_slot=2, max_depth=3)
    batch = drafting.draft(first, second, third)
    assert drafting.model.num_entry_passes == 1 and drafting.model.pass_sizes[:2] == [36 + 29 + 8 - 2, 2]
    drafting.expect_tree(batch, 0, first, 1)
    drafting.expect_tree(batch, 2, third, 1)
    # A later tree uses the KV entries written that way; few rows go in one pass.
    drafting.check(1, Row([*second.tokens, 5], 1, second.blocks, batch_slot=1))
    assert drafting.model.num_entry_passes == 1


def test_a_batch_of_which_no_logits_are_wanted_is_entries_alone() -> None:
    drafting = Drafting()
    row = Row(some_tokens(60), 60, list(range(15)), max_nodes=1)
    drafting.draft(row)
    assert drafting.model.pass_sizes == [59]
    drafting.check(1, Row([*row.tokens, 3], 1, [*row.blocks, 15]))


def test_levels_that_do_not_fit_end_the_attachment_and_not_the_process() -> None:
    drafting = Drafting()
    drafting.check(1, Row(some_tokens(10), 10, BLOCKS))
    drafting.model.max_level_rows = 1
    with pytest.raises(ValueError, match="a level of draft trees"):
        drafting.draft(Row(some_tokens(11), 1, BLOCKS, max_nodes=12, max_branches=3))
    drafting.model.max_level_rows = None
    drafting.check(1, Row(some_tokens(12), 1, BLOCKS))
    drafting.model.vocab_limit = 0
    with pytest.raises(ValueError, match="a level of draft trees"):
        drafting.draft(Row(some_tokens(13), 1, BLOCKS, max_nodes=12, max_branches=3))


@ALL_KINDS
def test_a_prefix_that_the_cache_holds_is_gone_on_from(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    first = some_tokens(11)
    drafting.check(int(drafting.hidden), Row(first, 11, [5, 2, 9]))
    # The verifier computes from position 8 on, and sends hidden states from there.
    second = [*first[:8], *some_tokens(5, 1)]
    before = drafting.passes.figures.extend_tokens
    drafting.check(int(drafting.hidden), Row(second, 13, [5, 2, 4, 6], batch_slot=1, hidden=5))
    assert drafting.passes.figures.extend_tokens - before == 5


@ALL_KINDS
def test_a_prefix_that_is_sent_in_two_parts(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    tokens = some_tokens(20)
    drafting.check(int(drafting.hidden), Row(tokens, 20, BLOCKS))
    other = [*tokens[:16], *some_tokens(3, 1)]
    drafting.draft(Row(other[:6], 6, BLOCKS, batch_slot=1, hidden=0, max_nodes=1))
    drafting.check(int(drafting.hidden), Row(other, 13, [*BLOCKS[:4], 1], batch_slot=1, hidden=3))


def test_a_recycled_block_ends_the_prefix_of_a_head_and_starts_a_window() -> None:
    drafting = Drafting()
    first = some_tokens(17)
    drafting.check(1, Row(first, 17, [5, 2, 9, 0, 7]))
    drafting.check(1, Row(some_tokens(6, 1), 6, [2, 11], batch_slot=1))
    again = [*first[:16], *some_tokens(2, 2)]
    drafting.check(2 * BLOCK, Row(again, 18, [5, 2, 9, 0, 6], batch_slot=2, hidden=2))
    assert drafting.passes.figures.gauges()["draft_window_rows"] == 1


def test_a_recycled_block_is_prefilled_again_by_a_draft_model() -> None:
    drafting = Drafting(hidden=False)
    first = some_tokens(17)
    drafting.check(0, Row(first, 17, [5, 2, 9, 0, 7]))
    drafting.check(0, Row(some_tokens(6, 1), 6, [2, 11], batch_slot=1))
    drafting.check(0, Row([*first[:16], *some_tokens(2, 2)], 18, [5, 2, 9, 0, 6], batch_slot=2))


@ALL_KINDS
def test_a_block_that_is_half_overwritten_is_nobodys_prefix(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    first = some_tokens(9)
    drafting.check(start, Row(first, 9, [5, 2, 9]))
    drafting.check(start, Row(some_tokens(2, 1), 2, [2], batch_slot=1))
    row = Row([*first[:8], 7, 8], 10, [5, 2, 4], batch_slot=2, hidden=2)
    if drafting.num_depths == 1:
        drafting.check(8 if drafting.hidden else 0, row)
    else:
        # Not even the carried output: modules after the first start later.
        drafting.check(8, row)


@ALL_KINDS
def test_another_tenants_prefix_is_not_gone_on_from(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    tokens = some_tokens(9)
    drafting.check(start, Row(tokens, 9, [5, 2, 9], salt=1))
    row = Row([*tokens[:8], 1, 2], 10, [5, 2, 4], batch_slot=1, salt=2, hidden=2)
    drafting.check(8 if drafting.hidden else 0, row)


def test_a_gap_starts_a_window() -> None:
    drafting = Drafting()
    tokens = some_tokens(30)
    drafting.check(1, Row(tokens[:9], 9, BLOCKS))
    # Tokens 9 and 10 were sent in a request that was lost.
    drafting.check(11, Row(tokens[:13], 2, BLOCKS))
    drafting.check(11, Row(tokens[:14], 1, BLOCKS))
    # A sequence that is known only from here on makes no prefix for others.
    drafting.check(11, Row(tokens[:22], 8, BLOCKS))
    drafting.check_undrafted(Row(tokens[:20], 20, BLOCKS, batch_slot=1, hidden=0))


def test_a_gap_of_hidden_states_starts_a_window() -> None:
    drafting = Drafting()
    tokens = some_tokens(30)
    drafting.check(1, Row(tokens[:9], 9, BLOCKS))
    drafting.check(11, Row(tokens[:13], 4, BLOCKS, hidden=2))
    drafting.check_undrafted(Row(tokens[:15], 2, BLOCKS, hidden=0))
    drafting.check(15, Row(tokens[:16], 1, BLOCKS))


def test_a_window_in_several_modules_starts_later_in_each() -> None:
    drafting = Drafting(num_depths=3)
    tokens = some_tokens(30)
    drafting.check(1, Row(tokens[:9], 9, BLOCKS))
    for length in (12, 13, 14, 15):
        drafting.check(11, Row(tokens[:length], 1, BLOCKS))


def test_a_draft_model_prefills_what_it_missed_of_a_sequence_from_the_gap_on() -> None:
    drafting = Drafting(hidden=False)
    tokens = some_tokens(30)
    drafting.check(0, Row(tokens[:9], 9, BLOCKS))
    drafting.check(11, Row(tokens[:13], 2, BLOCKS))


@ALL_KINDS
def test_a_new_generation_and_a_shorter_length_start_anew(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    drafting.check(start, Row(some_tokens(9), 9, BLOCKS))
    drafting.check(start, Row(some_tokens(6, 1), 6, [4, 6], generation=2))
    drafting.check(start, Row(some_tokens(5, 2), 5, [8, 10], generation=2))
    drafting.check(4, Row(some_tokens(7, 3), 3, [8, 10], generation=2))


@ALL_KINDS
def test_final_updates_are_written_before_the_new_owner_of_batch_slot_and_blocks(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    old = some_tokens(11)
    drafting.check(start, Row(old[:9], 9, [5, 2, 9]))
    ended = Row(old, 2, [5, 2, 9], max_nodes=1)
    new = Row(some_tokens(10, 1), 10, [9, 5, 4], generation=2)
    batch = drafting.draft(ended, new)
    assert batch.tree(0).num_nodes == 1
    drafting.expect_tree(batch, 1, new, start)
    # Block 2 alone is still the old text's.
    drafting.check(start, Row([*old[:4], 1], 5, [3, 8], batch_slot=1))


@ALL_KINDS
def test_final_updates_that_come_in_parts_between_the_new_owners_tokens(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    old, new = some_tokens(11), some_tokens(10, 1)
    drafting.check(start, Row(old[:8], 8, [5, 2]))
    drafting.draft(Row(old[:10], 2, [5, 2, 9], max_nodes=1), Row(new[:9], 9, [9, 5, 4], generation=2, max_nodes=1))
    # The old sequence's last block belongs to the new one by now, and is left alone.
    owner = Row(new, 1, [9, 5, 4], generation=2)
    batch = drafting.draft(Row(old, 1, [5, 2, 9], max_nodes=1), owner)
    drafting.expect_tree(batch, 1, owner, start)
    # Still older tokens are ignored.
    drafting.check_undrafted(Row(old, 3, [5, 2, 9], generation=0))
    longer = Row([*new, 7], 1, [9, 5, 4], generation=2)
    drafting.check(start, longer)


def test_a_row_without_any_token_forgets_nothing() -> None:
    drafting = Drafting()
    tokens = some_tokens(9)
    drafting.check(1, Row(tokens[:8], 8, BLOCKS))
    batch = drafting.draft(Row([], 0, [], generation=2, max_nodes=1))
    assert batch.tree(0).num_nodes == 1
    drafting.check(1, Row(tokens, 1, BLOCKS))


@ALL_KINDS
def test_a_final_update_makes_a_prefix_for_a_row_of_the_same_request(kind: dict[str, Any]) -> None:
    drafting = Drafting(**kind)
    start = int(drafting.hidden)
    old = some_tokens(9)
    drafting.check(start, Row(old[:6], 6, [5, 2]))
    ended = Row(old[:8], 2, [5, 2], max_nodes=1)
    goes_on = Row(old, 9, [5, 2, 9], batch_slot=1, hidden=1)
    for order in ((ended, goes_on), (goes_on, ended)):
        drafting = Drafting(**kind)
        drafting.draft(Row(old[:6], 6, [5, 2]))
        batch = drafting.draft(*order)
        drafting.expect_tree(batch, order.index(goes_on), goes_on, start)


def test_a_released_sequence_is_forgotten_and_its_blocks_are_not() -> None:
    drafting = Drafting()
    tokens = some_tokens(9)
    drafting.check(1, Row(tokens, 9, [5, 2, 9]))
    drafting.rows.release(0)
    drafting.check(10, Row([*tokens, 1, 2], 1, [5, 2, 9]))
    drafting.check(1, Row([*tokens[:8], 3], 9, [5, 2, 4], batch_slot=1, hidden=1))


def test_a_draft_model_catches_up_within_its_budget() -> None:
    drafting = Drafting(hidden=False, budget=70, max_model_len=400, num_blocks=120)
    tokens, blocks = some_tokens(200), list(range(80))
    other = Row(some_tokens(8, 1), 8, [90, 91], batch_slot=1)
    for length, new in ((180, 180), (181, 1)):
        batch = drafting.draft(Row(tokens[:length], new, blocks), other)
        assert batch.tree(0).num_nodes == 1
        drafting.expect_tree(batch, 1, other, 0)
        other = Row([*other.tokens, 1], 1, [90, 91, 92], batch_slot=1)
    drafting.check(0, Row(tokens[:182], 1, blocks))


def test_a_draft_model_drafts_again_where_nothing_is_new() -> None:
    drafting = Drafting(hidden=False)
    tokens = some_tokens(8)
    drafting.check(0, Row(tokens, 8, BLOCKS))
    drafting.check(0, Row(tokens, 0, BLOCKS))
    # The whole prompt is in the cache.
    drafting.check(0, Row(tokens, 8, BLOCKS, batch_slot=1))


@pytest.mark.parametrize(
    "row",
    [
        Row([1, VOCAB], 2, [0]),
        Row([1, -1], 2, [0]),
        Row([1, 2], 2, [99]),
        Row([1, 2, 3, 4, 5], 5, [0]),
        Row([1, 2], 2, [0], batch_slot=77),
        Row([1, 2], 2, [0], batch_slot=-1),
    ],
)
def test_a_row_that_cannot_be_is_not_drafted_for(row: Row) -> None:
    drafting = Drafting()
    good = Row(some_tokens(5), 5, [3, 4], batch_slot=1)
    batch = drafting.draft(row, good)
    assert batch.tree(0).tokens.tolist() == row.tokens[-1:]
    drafting.expect_tree(batch, 1, good, 1)


def test_gauges() -> None:
    drafting = Drafting()
    drafting.draft(Row(some_tokens(5), 5, [3, 4]), Row(some_tokens(5), 5, [5, 6], batch_slot=1, max_nodes=1))
    gauges = drafting.passes.figures.gauges()
    assert {name: gauges[name] for name in ("draft_rows", "draft_drafted_rows", "draft_extend_tokens")} == {
        "draft_rows": 2,
        "draft_drafted_rows": 1,
        "draft_extend_tokens": 8,
    }
    assert gauges["draft_extend_s"] > 0
    assert gauges["draft_grow_s"] > 0
