"""What a drafter prepares for before requests ask for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch
from foretoken_kernels.gpu.matmul_choice import ROW_BUCKETS
from foretoken_kernels.gpu.tree_attention import _num_splits, _tile, attention_workspace

from drafter_svc.device.usual_drafts import PROMPT_WIDTHS, UsualDraft, prompt_sizes, usual_drafts
from foretoken.drafting import TreeLimits
from foretoken.overlap_memory import OverlapLayout
from foretoken.transports.draft_wire import target_from_proto, target_to_proto
from tests.support.paged_draft import target_info

LAYOUT = OverlapLayout(batch_rows=6, tokens=4, nodes=8, hidden_width=2, hidden_dtype=torch.bfloat16)
TREES = TreeLimits(1, 1), TreeLimits(3, 1), TreeLimits(3, 2)
BLOCK_SIZE, HEAD_DIM = 16, 128


def test_few_short_sequences_come_first() -> None:
    found = list(usual_drafts(target_info(usual_trees=TREES), LAYOUT))
    assert len(found) == len(set(found)) == 2 * 2 * 4 * len(TREES)
    assert [draft[:3] for draft in found[:4]] == [(1, 1, 1), (1, 3, 1), (1, 3, 2), (2, 1, 1)]
    assert {draft.batch_rows for draft in found} == {1, 2, 4, 6}
    short = [draft for draft in found if draft.num_blocks == found[0].num_blocks]
    assert found[: len(short)] == short and not any(draft.filtered for draft in short[: len(short) // 2])


def test_trees_are_no_larger_than_the_memory_holds() -> None:
    target = target_info(usual_trees=(TreeLimits(2**31, 2**31),))
    assert next(usual_drafts(target, LAYOUT)) == UsualDraft(1, 3, 16, 1, filtered=False)


def test_a_verifier_that_names_no_trees_gets_no_graphs() -> None:
    assert not deque(usual_drafts(target_info(), LAYOUT))


def test_the_usual_trees_reach_the_drafter() -> None:
    target = target_info(usual_trees=TREES)
    assert target_from_proto(target_to_proto(target)) == target
    assert target_from_proto(target_to_proto(replace(target, usual_trees=()))).usual_trees == ()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(32, 8), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((16, 2), (8, 8), (12, 4)))],
)
def test_prompts_need_no_other_attention_than_that_of_the_warm_up(num_heads: int, num_kv_heads: int) -> None:
    most_rows, most_seqs = 512, 512
    workspace = attention_workspace(most_rows, num_heads, num_kv_heads, HEAD_DIM, "cpu")

    def kernel(seqs: int, longest: int, rows: int, blocks: int) -> Hashable:
        """Return what selects the kernel, as tree_attention does on a GPU."""
        most_keys = blocks * BLOCK_SIZE + 64
        group = num_heads // num_kv_heads
        tile = _tile(seqs, longest, num_kv_heads, group, HEAD_DIM, wide=False, most_keys=most_keys)
        programs = seqs * -(-longest // tile.rows) * num_kv_heads
        warps = programs * (4 if tile.one_loop else tile.num_warps)
        splits = _num_splits(rows, tile.splits, warps, most_keys, workspace)
        return tile._replace(splits=1), splits > 1

    warm = {
        kernel(seqs, longest, seqs - 1 + longest, blocks)
        for seqs, longest in prompt_sizes(most_rows, most_seqs)
        for blocks in (*PROMPT_WIDTHS, 2500)
    }
    missing = {
        kernel(seqs, longest, rows, blocks)
        for seqs in range(1, most_seqs + 1, 3)
        for longest in range(1, most_rows + 2 - seqs, 3)
        for rows in {seqs - 1 + longest, min(seqs * longest, most_rows)}
        for blocks in (128, 256, 512, 2500)
    } - warm
    assert not missing


def test_prompts_of_each_matmul_bucket_are_warm() -> None:
    assert set(ROW_BUCKETS) <= {rows for seqs, rows in prompt_sizes(512, 8) if seqs == 1}
    assert all(seqs <= 8 and seqs - 1 + rows <= 512 for seqs, rows in prompt_sizes(512, 8))
    assert not list(prompt_sizes(0, 8))
