# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Children of draft trees' nodes: the best ids of each row of logits, in chunks of the vocabulary, then row by row.

A sum of exp takes all values; foretoken_kernels.cpu.draft_tree leaves those out that have next to no chance.
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

# Ids of one program; a multiple of four.
CHUNK = 1024
_NUM_WARPS = 2  # which wait for each other at each child

_LENGTH = tl.constexpr(state.LENGTH)
_CHOICE_INDEX = tl.constexpr(state.CHOICE_INDEX)
_SEED_LOW = tl.constexpr(state.SEED_LOW)
_SEED_HIGH = tl.constexpr(state.SEED_HIGH)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)


@triton.jit
def _score_factor(temperature, scale, COUPLED: tl.constexpr):
    """What values are multiplied by in the softmax that gives the scores."""
    if COUPLED:
        return tl.where(temperature > 0.0, temperature / scale, 1.0)
    else:
        return tl.where(temperature > 0.0, 1.0, 1.0)


@triton.jit(do_not_specialize=["fed_stride", "num_chunks", "vocab_limit", "level"])
def _offer_chunk(
    requests,
    fed_counts,
    fed_stride,
    logits,
    logits_stride,
    target_ids,
    cuts,
    out_keys,
    out_largest,
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
):
    """The best keys of a row's chunk of the vocabulary, its largest value, and its sum of exp."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tree = row if IS_ROOT else row // K
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < vocab_limit
    # On their way while it is found out what to do with them.
    values = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=is_id, other=NEVER).to(tl.float32)
    temperature = temperature_of(requests, tree)
    if children_of(requests, fed_counts, fed_stride, tree, row % K, level, IS_ROOT, K) == 0:
        return
    values = tl.where(values == values, values, NEVER)
    if temperature > 0.0:
        # As the sampler divides.
        values = tl.div_rn(values, tl.zeros([CHUNK], tl.float32) + temperature)
        if HAS_CUTS:
            values = tl.where(values >= tl.load(cuts + row), values, NEVER)
        if COUPLED:
            request = requests + tree * _NUM_COLUMNS
            position = tl.load(request + _LENGTH) + level
            choice_index = tl.load(request + _CHOICE_INDEX)
            seed_low, seed_high = tl.load(request + _SEED_LOW), tl.load(request + _SEED_HIGH)
            if HAS_MAP:
                tokens = tl.load(target_ids + ids, mask=is_id, other=0)
                values += scattered_noise(tokens, position, choice_index, seed_low, seed_high)
            else:
                words = token_words(chunk * (CHUNK // 4), position, choice_index, seed_low, seed_high, CHUNK)
                values += gumbel_from_words(words)
    factor = _score_factor(temperature, scale, COUPLED)
    largest = tl.max(values, axis=0)
    # Without values to compare there is nothing to add: a row that holds +inf has no children.
    has_values = finite_flag(largest)
    is_finite = (values > NEVER) & (has_values != 0)
    distance = tl.where(is_finite, values, 0.0) - tl.where(has_values != 0, largest, 0.0)
    total = tl.sum(tl.where(is_finite, tl.exp(tl.where(is_finite, distance * factor, 0.0)), 0.0), axis=0)
    place = row.to(tl.int64) * num_chunks + chunk
    tl.store(out_keys + place * K + tl.arange(0, K), take_best(make_keys(values, ids), K))
    tl.store(out_largest + place, largest)
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
    target_ids,
    in_keys,
    in_largest,
    in_sums,
    num_chunks,
    vocab_limit,
    scale,
    level,
    IS_ROOT: tl.constexpr,
    COUPLED: tl.constexpr,
    HAS_MAP: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The children of a row of logits, from its chunks: they take their places among the candidates."""
    row = tl.program_id(0)
    tree = row if IS_ROOT else row // K
    beam = 0 if IS_ROOT else row % K
    most = children_of(requests, fed_counts, fed_stride, tree, beam, level, IS_ROOT, K)
    chunks = tl.arange(0, CHUNKS)
    num_used = tl.where(most > 0, num_chunks, 0)
    is_chunk = chunks < num_used
    first = row.to(tl.int64) * num_chunks
    largest_of = tl.load(in_largest + first + chunks, mask=is_chunk, other=NEVER)
    sums = tl.load(in_sums + first + chunks, mask=is_chunk, other=0.0)
    largest = tl.max(largest_of, axis=0)
    has_children = finite_flag(largest) != 0
    factor = _score_factor(temperature_of(requests, tree), scale, COUPLED)
    counts = has_children & (largest_of > NEVER)
    weights = tl.exp(tl.where(counts, (tl.where(counts, largest_of, 0.0) - largest) * factor, 0.0))
    log_sum = tl.log(tl.where(has_children, tl.sum(tl.where(counts, sums * weights, 0.0), axis=0), 1.0))

    places = tl.arange(0, CHUNKS * K)
    keys = take_best(tl.load(in_keys + first * K + places, mask=places < num_used * K, other=NO_KEY), K)
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
        keys=torch.zeros((rows, chunks, max_branches), dtype=torch.int64, device=device),
        largest=torch.zeros((rows, chunks), dtype=torch.float32, device=device),
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
        logits: float32 or bfloat16, rows of unit stride. Of level 0: [trees, draft vocabulary], of the roots; of level
            d: [trees * K, draft vocabulary], row ``b * K + k`` of tree b's beam k of that level. NaN counts as -inf; a
            row that holds +inf, or nothing else than -inf, has no children.
        vocab_limit: draft ids below this may be drafted.
        target_ids: int32 [draft vocabulary]; the target's id of each draft id; None: the same.
        scale: of the values in the coupled score, in units of logits; 0: draft without the sampler's noise.
        filtered: whether TOP_K, TOP_P and MIN_P count; where no tree has any, without them there is one launch less.
    """
    branches, num_trees = trees.max_branches, trees.requests.shape[0]
    num_rows = num_trees if level == 0 else num_trees * branches
    num_chunks = triton.cdiv(vocab_limit, CHUNK)
    if logits.shape[0] < num_rows or vocab_limit > logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for {num_rows} rows of {vocab_limit} ids")
    if num_rows * num_chunks * branches > workspace.keys.numel() or not 0 <= level < trees.max_depth:
        raise ValueError(f"level {level} of {num_rows} rows does not fit the workspace or the trees")
    if target_ids is not None and len(target_ids) < vocab_limit:
        raise ValueError(f"a map of {len(target_ids)} ids, fewer than {vocab_limit}")
    known_ids = trees.tokens if target_ids is None else target_ids
    flags = {"IS_ROOT": level == 0, "COUPLED": scale > 0.0, "HAS_MAP": target_ids is not None, "K": branches}
    chunks = (workspace.keys, workspace.largest, workspace.sums)
    if filtered:
        find_cuts(trees, logits, level, workspace.cuts, vocab_limit)
    _offer_chunk[num_rows, num_chunks](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        logits,
        logits.stride(0),
        known_ids,
        workspace.cuts,
        *chunks,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        HAS_CUTS=filtered,
        CHUNK=CHUNK,
        num_warps=_NUM_WARPS,
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
        known_ids,
        *chunks,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )
