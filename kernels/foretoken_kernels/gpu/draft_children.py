# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Offer children of draft trees' nodes: the best ids of each row of logits.

The first launch goes over the vocabulary and writes the largest value of each part. The best K ids
of a row are in the K parts with the largest values, because each of these parts has a better id
than any other part. The second launch, one program a row, reads these parts alone.

The sum of exp includes all values; foretoken_kernels.cpu.draft_tree leaves out values with almost
no chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_cut import find_cuts
from foretoken_kernels.gpu.draft_keys import (
    NEVER,
    NO_KEY,
    children_of,
    finite_flag,
    ids_of_keys,
    make_keys,
    take_best,
    temperature_of,
    values_of_keys,
)
from foretoken_kernels.gpu.draft_tree_state import DraftTrees, OfferWorkspace
from foretoken_kernels.gpu.noise import gumbel_from_words, scattered_noise, token_words

# Ids of one program; a multiple of PART.
CHUNK = 1024
# Ids of one part, whose largest value is kept; a multiple of four.
PART = 64
_CHUNK_WARPS = 1
_ROW_WARPS = 4

_LENGTH = tl.constexpr(state.LENGTH)
_CHOICE_INDEX = tl.constexpr(state.CHOICE_INDEX)
_SEED_LOW = tl.constexpr(state.SEED_LOW)
_SEED_HIGH = tl.constexpr(state.SEED_HIGH)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)


@triton.jit
def _drafted_values(
    logits,
    ids,
    is_id,
    requests,
    tree,
    temperature,
    target_ids,
    cut,
    level,
    IS_STRETCH: tl.constexpr,
    COUPLED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Return float32 [SIZE]: the values by which ids are compared, computed from their logits.

    ``IS_STRETCH``: ids are consecutive and start at a multiple of four.
    """
    values = tl.where(logits == logits, logits, NEVER)
    if temperature > 0.0:
        # Divide as the sampler does.
        values = tl.div_rn(values, tl.zeros([SIZE], tl.float32) + temperature)
        values = tl.where(values >= cut, values, NEVER)
        if COUPLED:
            request = requests + tree * _NUM_COLUMNS
            position = tl.load(request + _LENGTH) + level
            choice_index = tl.load(request + _CHOICE_INDEX)
            seed_low, seed_high = tl.load(request + _SEED_LOW), tl.load(request + _SEED_HIGH)
            if HAS_MAP:
                tokens = tl.load(target_ids + ids, mask=is_id, other=0)
                values += scattered_noise(tokens, position, choice_index, seed_low, seed_high)
            elif IS_STRETCH:
                words = token_words(tl.min(ids, axis=0) // 4, position, choice_index, seed_low, seed_high, SIZE)
                values += gumbel_from_words(words)
            else:
                values += scattered_noise(ids, position, choice_index, seed_low, seed_high)
    return values


@triton.jit
def _score_factor(temperature, scale, COUPLED: tl.constexpr):
    """Return the factor of the values in the softmax that gives the scores."""
    if COUPLED:
        return tl.where(temperature > 0.0, temperature / scale, 1.0)
    else:
        return tl.where(temperature > 0.0, 1.0, 1.0)


@triton.jit(do_not_specialize=["fed_stride", "num_chunks", "vocab_limit", "level"])
def _look_through_chunk(
    requests,
    fed_counts,
    fed_stride,
    logits,
    logits_stride,
    target_ids,
    cuts,
    out_parts,
    out_sums,
    num_chunks,
    vocab_limit,
    scale,
    level,
    IS_ROOT: tl.constexpr,
    COUPLED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Write a chunk's sum of exp, and the largest value of each of its parts, for one row."""
    PARTS: tl.constexpr = CHUNK // PART
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tree = row if IS_ROOT else row // K
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < vocab_limit
    # Load before deciding what to do with the logits, to hide the latency.
    raw = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=is_id, other=NEVER).to(tl.float32)
    temperature = temperature_of(requests, tree)
    if children_of(requests, fed_counts, fed_stride, tree, row % K, level, IS_ROOT, K) == 0:
        return
    cut = NEVER
    if HAS_CUTS:
        cut = tl.load(cuts + row)
    values = _drafted_values(
        raw, ids, is_id, requests, tree, temperature, target_ids, cut, level, True, COUPLED, HAS_MAP, CHUNK
    )
    factor = _score_factor(temperature, scale, COUPLED)
    parts = tl.max(tl.reshape(values, [PARTS, PART]), axis=1)
    largest = tl.max(parts, axis=0)
    # Without finite values there is nothing to add: a row that contains +inf has no children.
    has_values = finite_flag(largest)
    is_finite = (values > NEVER) & (has_values != 0)
    distance = tl.where(is_finite, values, 0.0) - tl.where(has_values != 0, largest, 0.0)
    total = tl.sum(tl.where(is_finite, tl.exp(tl.where(is_finite, distance * factor, 0.0)), 0.0), axis=0)
    place = row.to(tl.int64) * num_chunks + chunk
    tl.store(out_parts + place * PARTS + tl.arange(0, PARTS), parts)
    tl.store(out_sums + place, total)


@triton.jit(do_not_specialize=["fed_stride", "beam_stride", "num_candidates", "num_chunks", "vocab_limit", "level"])
def _offer_row(
    requests,
    fed_counts,
    fed_stride,
    beam_nodes,
    beam_stride,
    scores,
    tokens,
    num_candidates,
    logits,
    logits_stride,
    target_ids,
    cuts,
    in_parts,
    in_sums,
    num_chunks,
    vocab_limit,
    scale,
    level,
    IS_ROOT: tl.constexpr,
    COUPLED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Write the children of a row of logits, found in its best parts, to their candidate places."""
    PARTS: tl.constexpr = CHUNK // PART
    row = tl.program_id(0)
    tree = row if IS_ROOT else row // K
    beam = 0 if IS_ROOT else row % K
    most = children_of(requests, fed_counts, fed_stride, tree, beam, level, IS_ROOT, K)
    temperature = temperature_of(requests, tree)
    num_used = tl.where(most > 0, num_chunks, 0)
    first = row.to(tl.int64) * num_chunks
    parts = tl.arange(0, CHUNKS * PARTS)
    part_values = tl.load(in_parts + first * PARTS + parts, mask=parts < num_used * PARTS, other=NEVER)
    chunks = tl.arange(0, CHUNKS)
    sums = tl.load(in_sums + first + chunks, mask=chunks < num_used, other=0.0)
    best_parts = take_best(make_keys(part_values, parts), K)

    # Process the ids of the best parts again.
    ids = tl.where(best_parts != NO_KEY, ids_of_keys(best_parts), CHUNKS * PARTS)[:, None] * PART
    ids = tl.reshape(ids + tl.arange(0, PART)[None, :], [K * PART])
    is_id = ids < vocab_limit
    raw = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=is_id, other=NEVER).to(tl.float32)
    cut = NEVER
    if HAS_CUTS:
        cut = tl.load(cuts + row)
    again = _drafted_values(
        raw, ids, is_id, requests, tree, temperature, target_ids, cut, level, False, COUPLED, HAS_MAP, K * PART
    )

    # The softmax's sum over all chunks.
    largest_of = tl.max(tl.reshape(part_values, [CHUNKS, PARTS]), axis=1)
    largest = tl.max(largest_of, axis=0)
    has_children = finite_flag(largest) != 0
    factor = _score_factor(temperature, scale, COUPLED)
    counts = has_children & (largest_of > NEVER)
    weights = tl.exp(tl.where(counts, (tl.where(counts, largest_of, 0.0) - largest) * factor, 0.0))
    log_sum = tl.log(tl.where(has_children, tl.sum(tl.where(counts, sums * weights, 0.0), axis=0), 1.0))

    keys = take_best(make_keys(again, ids), K)
    children = tl.arange(0, K)
    exists = (keys != NO_KEY) & (children < most) & has_children
    draft_ids = tl.minimum(tl.maximum(tl.where(exists, ids_of_keys(keys), 0), 0), vocab_limit - 1)
    values = tl.where(exists, values_of_keys(keys), 0.0)
    score = tl.where(exists, (values - tl.where(has_children, largest, 0.0)) * factor - log_sum, 0.0)
    score = tl.minimum(score, 0.0)
    low = tree.to(tl.int64) * num_candidates
    at = low + children
    if not IS_ROOT:
        node = tl.load(beam_nodes + tree * beam_stride + (level - 1) * K + beam)
        node = tl.minimum(tl.maximum(node, 0), num_candidates - 1)
        score += tl.where(most > 0, tl.load(scores + low + node), 0.0)
        at += K + ((level - 1) * K + beam) * K
    chosen = draft_ids
    if HAS_MAP:
        chosen = tl.load(target_ids + draft_ids)
    tl.store(scores + at, tl.where(exists, score, NEVER))
    tl.store(tokens + at, tl.where(exists, chosen, 0))


def offer_workspace(
    max_trees: int, max_branches: int, draft_vocab_size: int, device: torch.device | str
) -> OfferWorkspace:
    rows, chunks = max_trees * max_branches, triton.cdiv(draft_vocab_size, CHUNK)
    return OfferWorkspace(
        parts=torch.zeros((rows, chunks, CHUNK // PART), dtype=torch.float32, device=device),
        sums=torch.zeros((rows, chunks), dtype=torch.float32, device=device),
        cuts=torch.zeros(rows, dtype=torch.float32, device=device),
    )


def offer_children(
    trees: DraftTrees,
    logits: torch.Tensor,
    level: int,
    workspace: OfferWorkspace,
    *,
    vocab_limit: int,
    target_ids: torch.Tensor | None = None,
    scale: float = 0.0,
    filtered: bool = True,
) -> None:
    """Let each row of logits offer the best children of its node.

    Args:
        logits: float32 or bfloat16, rows of unit stride. At level 0: [trees, draft vocabulary], the
            roots' logits. At level d: [trees * K, draft vocabulary]; row ``b * K + k`` belongs to
            beam k of tree b at that level. NaN counts as -inf; a row that contains +inf, or only
            -inf, has no children.
        vocab_limit: draft ids below this may be drafted.
        target_ids: int32 [draft vocabulary]; the target's id of each draft id; None if they are
            equal.
        scale: scale of the values in the coupled score, in units of logits; 0: draft without the
            sampler's noise.
        filtered: whether TOP_K, TOP_P and MIN_P apply. Pass False if no tree has any: this saves a
            launch.

    Raises:
        ValueError: the logits, the level, the workspace or the map do not fit.
    """
    branches, num_trees = trees.max_branches, trees.requests.shape[0]
    num_rows = num_trees if level == 0 else num_trees * branches
    num_chunks = triton.cdiv(vocab_limit, CHUNK)
    if logits.shape[0] < num_rows or vocab_limit > logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not hold {num_rows} rows of {vocab_limit} ids")
    if num_rows * num_chunks > workspace.sums.numel() or not 0 <= level < trees.max_depth:
        raise ValueError(f"level {level} of {num_rows} rows does not fit the workspace or the trees")
    if target_ids is not None and len(target_ids) < vocab_limit:
        raise ValueError(f"the map target_ids has {len(target_ids)} ids, fewer than {vocab_limit}")
    known_ids = trees.tokens if target_ids is None else target_ids
    flags = {"IS_ROOT": level == 0, "COUPLED": scale > 0.0, "HAS_MAP": target_ids is not None, "HAS_CUTS": filtered}
    sizes = {"K": branches, "CHUNK": CHUNK, "PART": PART}
    row_logits = (logits, logits.stride(0), known_ids, workspace.cuts)
    if filtered:
        find_cuts(trees, logits, level, workspace.cuts, vocab_limit)
    _look_through_chunk[num_rows, num_chunks](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        *row_logits,
        workspace.parts,
        workspace.sums,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        **sizes,
        num_warps=_CHUNK_WARPS,
    )
    _offer_row[(num_rows,)](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        trees.beam_nodes,
        trees.beam_nodes.stride(0),
        trees.scores,
        trees.tokens,
        trees.scores.shape[1],
        *row_logits,
        workspace.parts,
        workspace.sums,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        **sizes,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=_ROW_WARPS,
    )
