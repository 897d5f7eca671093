# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Grow draft trees on the device without the host: a whole draft can be one CUDA graph.

The trees are those of foretoken_kernels.cpu.draft_tree (EAGLE-2, Li et al., arXiv 2406.16858) with
static shapes: root logits -> ``offer_children`` -> [``choose_beams`` -> a pass of the draft model
-> ``offer_children``] x (levels - 1) -> ``emit_trees``. A tree that needs less than the shapes
allow leaves rows idle. foretoken_kernels.reference_draft_tree defines the functions.

Scores are float32; the CPU's are float64. The sum of exp includes all values; the CPU leaves out
values with almost no chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_children import offer_children, offer_workspace
from foretoken_kernels.gpu.draft_keys import (
    NEVER,
    NO_KEY,
    branches_of,
    ids_of_keys,
    make_keys,
    order_of,
    take_best,
    values_of_keys,
)
from foretoken_kernels.gpu.draft_tree_state import DraftBeams, DraftOutput, DraftTrees

__all__ = ["choose_beams", "emit_trees", "offer_children", "offer_workspace", "padded_candidates"]

_LENGTH = tl.constexpr(state.LENGTH)
_MAX_NODES = tl.constexpr(state.MAX_NODES)
_FIRST_KV_SLOT = tl.constexpr(state.FIRST_KV_SLOT)
_ROOT_TOKEN = tl.constexpr(state.ROOT_TOKEN)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)
_MAX_BEAM_NODES = tl.constexpr(state.MAX_BEAM_NODES)


# A kernel is compiled for a number of branches, but not for a depth: otherwise the first tree of
# another depth, as at a sequence's end, would wait for the compiler.
@triton.jit(
    do_not_specialize=[
        "fed_stride",
        "beam_stride",
        "num_candidates",
        "num_blocks",
        "num_kv_slots",
        "scratch_kv_slot",
        "level",
        "first_depth",
    ]
)
def _choose_beams(
    requests,
    fed_counts,
    fed_stride,
    beam_nodes,
    beam_stride,
    path_masks,
    scores,
    tokens,
    num_candidates,
    block_tables,
    table_stride,
    num_blocks,
    block_size,
    num_kv_slots,
    scratch_kv_slot,
    out_token_ids,
    out_positions,
    out_kv_slots,
    out_context_lens,
    out_masks,
    out_sources,
    level,
    first_depth,
    IS_FIRST: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Choose a tree's beams of one level: the best of its candidates of that depth."""
    NEW: tl.constexpr = K if IS_FIRST else K * K
    high = K + (level - 1) * K * K
    tree = tl.program_id(0)
    request = requests + tree * _NUM_COLUMNS
    low = tree.to(tl.int64) * num_candidates
    level_low = high - NEW
    news = tl.arange(0, NEW)
    keys = take_best(make_keys(tl.load(scores + low + level_low + news), news), K)
    beams = tl.arange(0, K)
    exists = keys != NO_KEY
    within = tl.where(exists, ids_of_keys(keys), 0)
    within = tl.minimum(tl.maximum(within, 0), NEW - 1)
    nodes = level_low + within

    # A child's score is never above its parent's, and the child comes later. So a candidate that
    # the tree has no room for has no child in the tree, and need not be run. Beams are in order:
    # those to run come first.
    everything = tl.arange(0, PADDED)
    all_scores = tl.load(scores + low + everything, mask=everything < high, other=NEVER)
    beam_scores = tl.where(exists, values_of_keys(keys), 0.0)
    is_ahead = (all_scores[:, None] > beam_scores[None, :]) | (
        (all_scores[:, None] == beam_scores[None, :]) & (everything[:, None] < nodes[None, :])
    )
    ahead = tl.sum(is_ahead.to(tl.int32), axis=0)
    fed_at = fed_counts + tree * fed_stride
    fed_before = 0
    if not IS_FIRST:
        fed_before = tl.minimum(tl.maximum(tl.load(fed_at + level), 0), _MAX_BEAM_NODES)
    most = tl.minimum(branches_of(requests, tree, level, K) + fed_before, _MAX_BEAM_NODES) - fed_before
    is_run = exists & (beams < most) & (ahead < tl.load(request + _MAX_NODES) - 1)
    if IS_FIRST:
        tl.store(fed_at + 1, 0)
    tl.store(fed_at + level + 1, fed_before + tl.sum(is_run.to(tl.int32), axis=0))

    fed = tl.minimum(fed_before + beams, _MAX_BEAM_NODES - 1)
    one = tl.full([K], 1, tl.int64)
    masks = one << fed.to(tl.int64)
    mask_at = path_masks + tree * _MAX_BEAM_NODES
    sources = tl.zeros([K], tl.int32) + tree
    if not IS_FIRST:
        parents = within // K
        parent_fed = tl.minimum(tl.maximum(tl.load(fed_at + level - 1) + parents, 0), _MAX_BEAM_NODES - 1)
        masks |= tl.load(mask_at + parent_fed)
        sources = tree * K + tl.where(is_run, parents, 0)
    masks = tl.where(is_run, masks, 0)
    tl.store(mask_at + fed, masks, mask=is_run)
    tl.store(beam_nodes + tree * beam_stride + (level - 1) * K + beams, tl.where(is_run, nodes, 0))
    # Another module computed keys and values of the beams above this depth; they ran before all
    # others.
    above = tl.load(fed_at + first_depth, mask=first_depth > 1, other=0)
    above = tl.minimum(tl.maximum(above, 0), _MAX_BEAM_NODES - 1).to(tl.int64)
    masks = (masks >> above) << above

    length = tl.load(request + _LENGTH)
    logical = tl.maximum(tl.load(request + _FIRST_KV_SLOT), 0) + fed
    entry = logical // block_size
    is_entry = is_run & (entry < num_blocks)
    block = tl.load(block_tables + tree.to(tl.int64) * table_stride + entry, mask=is_entry, other=0)
    kv_slots = block * block_size + logical % block_size
    is_kv_slot = is_entry & (block >= 0) & (kv_slots >= 0) & (kv_slots < num_kv_slots)
    row = tree * K + beams
    tl.store(out_token_ids + row, tl.where(is_run, tl.load(tokens + low + nodes), 0))
    tl.store(out_positions + row, tl.where(is_run, length - 1 + level, 0))
    tl.store(out_kv_slots + row, tl.where(is_kv_slot, kv_slots, scratch_kv_slot))
    tl.store(out_context_lens + row, tl.where(is_run, length, 0))
    tl.store(out_masks + row, masks)
    tl.store(out_sources + row, sources)


@triton.jit(do_not_specialize=["num_candidates", "num_nodes"])
def _place_nodes(requests, scores, places, out_num_nodes, num_candidates, num_nodes, PADDED: tl.constexpr):
    """Choose the candidates that a tree has room for, and write their node indices."""
    tree = tl.program_id(0)
    low = tree.to(tl.int64) * num_candidates
    candidates = tl.arange(0, PADDED)
    is_candidate = candidates < num_candidates
    values = tl.load(scores + low + candidates, mask=is_candidate, other=NEVER)
    exists = values > NEVER
    ordered = order_of(values).to(tl.int64)
    room = tl.minimum(tl.load(requests + tree * _NUM_COLUMNS + _MAX_NODES), num_nodes) - 1
    room = tl.maximum(room, 0)
    # Find the lowest score that the tree has room for, by bisection.
    least = room.to(tl.int64) * 0 - 0x80000000
    most = room.to(tl.int64) * 0 + 0x7FFFFFFF
    for _ in range(32):
        middle = (least + most + 1) >> 1
        is_low = tl.sum((exists & (ordered >= middle)).to(tl.int32), axis=0) >= room
        least = tl.where(is_low, middle, least)
        most = tl.where(is_low, most, middle - 1)
    is_above = exists & (ordered > least)
    is_equal = exists & (ordered == least)
    left = room - tl.sum(is_above.to(tl.int32), axis=0)
    is_chosen = is_above | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= left))
    order = tl.cumsum(is_chosen.to(tl.int32), axis=0)
    tl.store(places + low + candidates, tl.where(is_chosen, order, 0), mask=is_candidate)
    tl.store(out_num_nodes + tree, 1 + tl.sum(is_chosen.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["beam_stride", "num_candidates", "num_nodes"])
def _write_nodes(
    requests,
    beam_nodes,
    beam_stride,
    scores,
    tokens,
    places,
    num_candidates,
    in_num_nodes,
    out_tokens,
    out_parents,
    out_scores,
    num_nodes,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    NODES_PADDED: tl.constexpr,
):
    """Write a tree's nodes after its root."""
    tree = tl.program_id(0)
    low = tree.to(tl.int64) * num_candidates
    candidates = tl.arange(0, PADDED)
    is_candidate = candidates < num_candidates
    place = tl.load(places + low + candidates, mask=is_candidate, other=0)
    is_chosen = (place > 0) & (place < num_nodes)
    has_parent = is_chosen & (candidates >= K)
    beam = tl.where(has_parent, (candidates - K) // K, 0)
    parent = tl.load(beam_nodes + tree * beam_stride + beam, mask=has_parent, other=0)
    parent = tl.minimum(tl.maximum(parent, 0), num_candidates - 1)
    at = tree.to(tl.int64) * num_nodes
    tl.store(out_tokens + at + place, tl.load(tokens + low + candidates, mask=is_chosen, other=0), mask=is_chosen)
    tl.store(out_parents + at + place, tl.load(places + low + parent, mask=has_parent, other=0), mask=is_chosen)
    tl.store(out_scores + at + place, tl.load(scores + low + candidates, mask=is_chosen, other=0.0), mask=is_chosen)
    # Write the root, and fill up the rest after the last node.
    nodes = tl.arange(0, NODES_PADDED)
    is_rest = (nodes < num_nodes) & ((nodes == 0) | (nodes >= tl.load(in_num_nodes + tree)))
    root = tl.load(requests + tree * _NUM_COLUMNS + _ROOT_TOKEN)
    tl.store(out_tokens + at + nodes, tl.where(nodes == 0, root, 0), mask=is_rest)
    tl.store(out_parents + at + nodes, nodes * 0 - 1, mask=is_rest)
    tl.store(out_scores + at + nodes, nodes.to(tl.float32) * 0.0, mask=is_rest)


def padded_candidates(max_branches: int, max_depth: int) -> int:
    """Return the padded number of a tree's candidates.

    It takes few values over all depths, because kernels are compiled for each.
    """
    least = min(max(128, 8 * max_branches * max_branches), 512)
    return int(triton.next_power_of_2(max(state.num_candidates(max_branches, max_depth), least)))


def _num_warps(padded: int) -> int:
    """Return one warp if possible: waiting for other warps takes longer than a few more lanes."""
    return 1 if padded <= 128 else 4


def choose_beams(
    trees: DraftTrees,
    level: int,
    block_tables: torch.Tensor,
    block_size: int,
    beams: DraftBeams,
    *,
    num_kv_slots: int,
    scratch_kv_slot: int,
    first_depth: int = 0,
) -> None:
    """Fill ``beams`` with the nodes of depth ``level`` to run.

    Args:
        level: 1 to the trees' levels - 1.
        block_tables: int32 [trees, blocks]; a tree's beams use the logical KV slots from its
            FIRST_KV_SLOT on.
        block_size: KV slots in a block.
        num_kv_slots: KV slots in the cache. A row without a beam, or with a KV slot outside the
            cache, writes to ``scratch_kv_slot``.
        first_depth: the masks leave out ancestors above this depth: another module computed their
            keys and values.

    Raises:
        ValueError: the level does not fit the trees or the beams.
    """
    branches, num_trees = trees.max_branches, trees.requests.shape[0]
    if not 1 <= level < trees.max_depth or len(beams.token_ids) < num_trees * branches or first_depth > level:
        raise ValueError(f"level {level} of {num_trees} trees does not fit the trees or the beams")
    padded = padded_candidates(branches, trees.max_depth)
    _choose_beams[(num_trees,)](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        trees.beam_nodes,
        trees.beam_nodes.stride(0),
        trees.masks,
        trees.scores,
        trees.tokens,
        trees.scores.shape[1],
        block_tables,
        block_tables.stride(0),
        block_tables.shape[1],
        block_size,
        num_kv_slots,
        scratch_kv_slot,
        beams.token_ids,
        beams.positions,
        beams.kv_slots,
        beams.context_lens,
        beams.masks,
        beams.sources,
        level,
        first_depth,
        IS_FIRST=level == 1,
        K=branches,
        PADDED=padded,
        num_warps=_num_warps(padded),
    )


def emit_trees(trees: DraftTrees, out: DraftOutput) -> None:
    """Write the best nodes of each tree, at most its MAX_NODES and as many as ``out`` holds.

    Raises:
        ValueError: ``out`` has another number of trees.
    """
    num_trees, size = trees.scores.shape
    num_nodes = out.tokens.shape[1]
    if len(out.tokens) < num_trees:
        raise ValueError(f"the output holds {len(out.tokens)} trees, not {num_trees}")
    padded = padded_candidates(trees.max_branches, trees.max_depth)
    _place_nodes[(num_trees,)](
        trees.requests,
        trees.scores,
        trees.places,
        out.num_nodes,
        size,
        num_nodes,
        PADDED=padded,
        num_warps=_num_warps(padded),
    )
    _write_nodes[(num_trees,)](
        trees.requests,
        trees.beam_nodes,
        trees.beam_nodes.stride(0),
        trees.scores,
        trees.tokens,
        trees.places,
        size,
        out.num_nodes,
        out.tokens,
        out.parents,
        out.scores,
        num_nodes,
        K=trees.max_branches,
        PADDED=padded,
        NODES_PADDED=triton.next_power_of_2(num_nodes),
    )
