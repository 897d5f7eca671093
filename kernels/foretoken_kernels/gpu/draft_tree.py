# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Growth of draft trees on the device, without a word to the host: a whole draft can be one CUDA graph.

The trees of foretoken_kernels.cpu.draft_tree (EAGLE-2, Li et al., arXiv 2406.16858), of static shape: root logits ->
``offer_children`` -> [``choose_beams`` -> a pass of the draft model -> ``offer_children``] x (levels - 1) ->
``emit_trees``. Trees that want less than the shapes allow, or nothing, leave rows idle. foretoken_kernels.
reference_draft_tree defines the functions here.

Scores are float32, the CPU's float64. A sum of exp takes all values, the CPU's leaves those out that have no chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_tree_noise import run_noise, token_noise
from foretoken_kernels.gpu.draft_tree_state import DraftBeams, DraftOutput, DraftTrees, OfferWorkspace

# Ids of one program; a multiple of four.
CHUNK = 1024

_LENGTH = tl.constexpr(state.LENGTH)
_MAX_NODES = tl.constexpr(state.MAX_NODES)
_MAX_DEPTH = tl.constexpr(state.MAX_DEPTH)
_MAX_BRANCHES = tl.constexpr(state.MAX_BRANCHES)
_CHOICE_INDEX = tl.constexpr(state.CHOICE_INDEX)
_FIRST_SLOT = tl.constexpr(state.FIRST_SLOT)
_ROOT_TOKEN = tl.constexpr(state.ROOT_TOKEN)
_SEED_LOW = tl.constexpr(state.SEED_LOW)
_SEED_HIGH = tl.constexpr(state.SEED_HIGH)
_TEMPERATURE = tl.constexpr(state.TEMPERATURE)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)
_MAX_BEAM_NODES = tl.constexpr(state.MAX_BEAM_NODES)
_LOW_BITS = tl.constexpr(0x7FFFFFFF)
_NEVER = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
# Below every key.
_NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _ordered(values):
    """int32 in the order of float32 values, none of them NaN; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LOW_BITS)


@triton.jit
def _keys(values, ids):
    """int64 in the order of the values, of equal ones the lower id ahead; -inf is no key."""
    keys = (_ordered(values).to(tl.int64) << 32) | (ids ^ _LOW_BITS).to(tl.int64)
    return tl.where(values > _NEVER, keys, _NO_KEY)


@triton.jit
def _key_ids(keys):
    return (keys & _LOW_BITS).to(tl.int32) ^ _LOW_BITS


@triton.jit
def _key_values(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _is_finite(value):
    """1 or 0 for a scalar that is not NaN: Triton's interpreter cannot broadcast a comparison of float scalars."""
    return ((value > _NEVER) & (value < _INFINITY)).to(tl.int32)


@triton.jit
def _best_keys(keys, K: tl.constexpr):
    """int64 [K]: the K largest, in order."""
    lanes = tl.arange(0, K)
    best_keys = tl.full([K], _NO_KEY, tl.int64)
    for lane in range(K):
        best = tl.max(keys, axis=0)
        best_keys = tl.where(lanes == lane, best, best_keys)
        keys = tl.where(keys == best, _NO_KEY, keys)
    return best_keys


@triton.jit
def _temperature(requests, tree):
    return tl.load(requests + tree * _NUM_COLUMNS + _TEMPERATURE).to(tl.float32, bitcast=True)


@triton.jit
def _branches(requests, tree, level, K: tl.constexpr):
    """Children of a node of ``level`` in a tree, and beams of its next level: 0 if it is to be no deeper."""
    request = requests + tree * _NUM_COLUMNS
    depth = tl.minimum(tl.load(request + _MAX_DEPTH), tl.load(request + _MAX_NODES) - 1)
    return tl.where(level < depth, tl.maximum(tl.minimum(tl.load(request + _MAX_BRANCHES), K), 0), 0)


@triton.jit
def _children(requests, fed_counts, fed_stride, tree, beam, level, IS_ROOT: tl.constexpr, K: tl.constexpr):
    """Most children of a row of logits: 0 for one without a beam."""
    most = _branches(requests, tree, level, K)
    if not IS_ROOT:
        fed = fed_counts + tree * fed_stride + level
        most = tl.where(beam < tl.load(fed + 1) - tl.load(fed), most, 0)
    return most


@triton.jit
def _score_factor(temperature, scale, COUPLED: tl.constexpr):
    """What values are multiplied by in the softmax that gives the scores."""
    if COUPLED:
        return tl.where(temperature > 0.0, temperature / scale, 1.0)
    else:
        return tl.where(temperature > 0.0, 1.0, 1.0)


@triton.jit
def _offer_chunk(
    requests,
    fed_counts,
    fed_stride,
    logits,
    logits_stride,
    target_ids,
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
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The best keys of a row's chunk of the vocabulary, its largest value, and its sum of exp."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    tree = row if IS_ROOT else row // K
    if _children(requests, fed_counts, fed_stride, tree, row % K, level, IS_ROOT, K) == 0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < vocab_limit
    values = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=is_id, other=_NEVER).to(tl.float32)
    values = tl.where(values == values, values, _NEVER)
    temperature = _temperature(requests, tree)
    if temperature > 0.0:
        values = values / temperature
        if COUPLED:
            request = requests + tree * _NUM_COLUMNS
            position = tl.load(request + _LENGTH) + level
            choice_index = tl.load(request + _CHOICE_INDEX)
            seed_low, seed_high = tl.load(request + _SEED_LOW), tl.load(request + _SEED_HIGH)
            if HAS_MAP:
                tokens = tl.load(target_ids + ids, mask=is_id, other=0)
                values += token_noise(tokens, position, choice_index, seed_low, seed_high)
            else:
                values += run_noise(chunk * (CHUNK // 4), CHUNK // 4, position, choice_index, seed_low, seed_high)
    factor = _score_factor(temperature, scale, COUPLED)
    largest = tl.max(values, axis=0)
    # Without values to compare there is nothing to add: a row that holds +inf has no children.
    has_values = _is_finite(largest)
    is_finite = (values > _NEVER) & (has_values != 0)
    distance = tl.where(is_finite, values, 0.0) - tl.where(has_values != 0, largest, 0.0)
    total = tl.sum(tl.where(is_finite, tl.exp(tl.where(is_finite, distance * factor, 0.0)), 0.0), axis=0)
    place = row.to(tl.int64) * num_chunks + chunk
    tl.store(out_keys + place * K + tl.arange(0, K), _best_keys(_keys(values, ids), K))
    tl.store(out_largest + place, largest)
    tl.store(out_sums + place, total)


@triton.jit
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
    most = _children(requests, fed_counts, fed_stride, tree, beam, level, IS_ROOT, K)
    chunks = tl.arange(0, CHUNKS)
    num_used = tl.where(most > 0, num_chunks, 0)
    is_chunk = chunks < num_used
    first = row.to(tl.int64) * num_chunks
    largest_of = tl.load(in_largest + first + chunks, mask=is_chunk, other=_NEVER)
    sums = tl.load(in_sums + first + chunks, mask=is_chunk, other=0.0)
    largest = tl.max(largest_of, axis=0)
    has_children = _is_finite(largest) != 0
    factor = _score_factor(_temperature(requests, tree), scale, COUPLED)
    counts = has_children & (largest_of > _NEVER)
    weights = tl.exp(tl.where(counts, (tl.where(counts, largest_of, 0.0) - largest) * factor, 0.0))
    log_sum = tl.log(tl.where(has_children, tl.sum(tl.where(counts, sums * weights, 0.0), axis=0), 1.0))

    places = tl.arange(0, CHUNKS * K)
    keys = _best_keys(tl.load(in_keys + first * K + places, mask=places < num_used * K, other=_NO_KEY), K)
    children = tl.arange(0, K)
    exists = (keys != _NO_KEY) & (children < most) & has_children
    draft_ids = tl.minimum(tl.maximum(tl.where(exists, _key_ids(keys), 0), 0), vocab_limit - 1)
    values = tl.where(exists, _key_values(keys), 0.0)
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
    tl.store(scores + at, tl.where(exists, score, _NEVER))
    tl.store(tokens + at, tl.where(exists, chosen, 0))


@triton.jit
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
    num_slots,
    scratch_slot,
    out_token_ids,
    out_positions,
    out_slots,
    out_context_lens,
    out_masks,
    out_sources,
    LEVEL: tl.constexpr,
    FIRST_DEPTH: tl.constexpr,
    K: tl.constexpr,
    NEW: tl.constexpr,
    HIGH: tl.constexpr,
    HIGH_PADDED: tl.constexpr,
):
    """A tree's beams of one level: of its NEW candidates of that depth, the last of HIGH, the best."""
    tree = tl.program_id(0)
    request = requests + tree * _NUM_COLUMNS
    low = tree.to(tl.int64) * num_candidates
    level_low = HIGH - NEW
    news = tl.arange(0, NEW)
    keys = _best_keys(_keys(tl.load(scores + low + level_low + news), news), K)
    beams = tl.arange(0, K)
    exists = keys != _NO_KEY
    within = tl.where(exists, _key_ids(keys), 0)
    within = tl.minimum(tl.maximum(within, 0), NEW - 1)
    nodes = level_low + within

    # A child's score is never above its parent's and it stands behind it, so a candidate that the tree has no room for
    # has no child in it, and need not be run. Beams are in order: those that are run come first.
    everything = tl.arange(0, HIGH_PADDED)
    all_scores = tl.load(scores + low + everything, mask=everything < HIGH, other=_NEVER)
    beam_scores = tl.where(exists, _key_values(keys), 0.0)
    is_ahead = (all_scores[:, None] > beam_scores[None, :]) | (
        (all_scores[:, None] == beam_scores[None, :]) & (everything[:, None] < nodes[None, :])
    )
    ahead = tl.sum(is_ahead.to(tl.int32), axis=0)
    fed_at = fed_counts + tree * fed_stride
    fed_before = 0
    if LEVEL > 1:
        fed_before = tl.minimum(tl.maximum(tl.load(fed_at + LEVEL), 0), _MAX_BEAM_NODES)
    most = tl.minimum(_branches(requests, tree, LEVEL, K) + fed_before, _MAX_BEAM_NODES) - fed_before
    is_run = exists & (beams < most) & (ahead < tl.load(request + _MAX_NODES) - 1)
    if LEVEL == 1:
        tl.store(fed_at + 1, 0)
    tl.store(fed_at + LEVEL + 1, fed_before + tl.sum(is_run.to(tl.int32), axis=0))

    fed = tl.minimum(fed_before + beams, _MAX_BEAM_NODES - 1)
    one = tl.full([K], 1, tl.int64)
    masks = one << fed.to(tl.int64)
    mask_at = path_masks + tree * _MAX_BEAM_NODES
    sources = tl.zeros([K], tl.int32) + tree
    if LEVEL > 1:
        parents = within // K
        parent_fed = tl.minimum(tl.maximum(tl.load(fed_at + LEVEL - 1) + parents, 0), _MAX_BEAM_NODES - 1)
        masks |= tl.load(mask_at + parent_fed)
        sources = tree * K + tl.where(is_run, parents, 0)
    masks = tl.where(is_run, masks, 0)
    tl.store(mask_at + fed, masks, mask=is_run)
    tl.store(beam_nodes + tree * beam_stride + (LEVEL - 1) * K + beams, tl.where(is_run, nodes, 0))
    if FIRST_DEPTH > 1:
        # Beams above this depth are another module's keys and values; they were fed before all others.
        above = tl.minimum(tl.maximum(tl.load(fed_at + FIRST_DEPTH), 0), _MAX_BEAM_NODES - 1)
        masks = (masks >> above.to(tl.int64)) << above.to(tl.int64)

    length = tl.load(request + _LENGTH)
    logical = tl.maximum(tl.load(request + _FIRST_SLOT), 0) + fed
    entry = logical // block_size
    is_entry = is_run & (entry < num_blocks)
    block = tl.load(block_tables + tree.to(tl.int64) * table_stride + entry, mask=is_entry, other=0)
    slots = block * block_size + logical % block_size
    is_slot = is_entry & (block >= 0) & (slots >= 0) & (slots < num_slots)
    row = tree * K + beams
    tl.store(out_token_ids + row, tl.where(is_run, tl.load(tokens + low + nodes), 0))
    tl.store(out_positions + row, tl.where(is_run, length - 1 + LEVEL, 0))
    tl.store(out_slots + row, tl.where(is_slot, slots, scratch_slot))
    tl.store(out_context_lens + row, tl.where(is_run, length, 0))
    tl.store(out_masks + row, masks)
    tl.store(out_sources + row, sources)


@triton.jit
def _place_nodes(requests, scores, places, out_num_nodes, num_candidates, num_nodes, PADDED: tl.constexpr):
    """Which candidates a tree has room for, best first, and where they stand among its nodes."""
    tree = tl.program_id(0)
    low = tree.to(tl.int64) * num_candidates
    candidates = tl.arange(0, PADDED)
    is_candidate = candidates < num_candidates
    values = tl.load(scores + low + candidates, mask=is_candidate, other=_NEVER)
    exists = values > _NEVER
    ordered = _ordered(values).to(tl.int64)
    room = tl.minimum(tl.load(requests + tree * _NUM_COLUMNS + _MAX_NODES), num_nodes) - 1
    room = tl.maximum(room, 0)
    # The last score that there is room for, by bisection.
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


@triton.jit
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
    """A tree's nodes to their places, behind its root."""
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
    # The root, and what is behind the last node.
    nodes = tl.arange(0, NODES_PADDED)
    is_rest = (nodes < num_nodes) & ((nodes == 0) | (nodes >= tl.load(in_num_nodes + tree)))
    root = tl.load(requests + tree * _NUM_COLUMNS + _ROOT_TOKEN)
    tl.store(out_tokens + at + nodes, tl.where(nodes == 0, root, 0), mask=is_rest)
    tl.store(out_parents + at + nodes, nodes * 0 - 1, mask=is_rest)
    tl.store(out_scores + at + nodes, nodes.to(tl.float32) * 0.0, mask=is_rest)


def offer_workspace(
    max_trees: int, max_branches: int, draft_vocab_size: int, device: torch.device | str
) -> OfferWorkspace:
    rows, chunks = max_trees * max_branches, triton.cdiv(draft_vocab_size, CHUNK)
    return OfferWorkspace(
        keys=torch.zeros((rows, chunks, max_branches), dtype=torch.int64, device=device),
        largest=torch.zeros((rows, chunks), dtype=torch.float32, device=device),
        sums=torch.zeros((rows, chunks), dtype=torch.float32, device=device),
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
) -> None:
    """Let each row of logits offer the best children of its node.

    Args:
        logits: float32 or bfloat16, rows of unit stride. Of level 0: [trees, draft vocabulary], of the roots; of level
            d: [trees * K, draft vocabulary], row ``b * K + k`` of tree b's beam k of that level. NaN counts as -inf; a
            row that holds +inf, or nothing else than -inf, has no children.
        vocab_limit: draft ids below this may be drafted.
        target_ids: int32 [draft vocabulary]; the target's id of each draft id; None: the same.
        scale: of the values in the coupled score, in units of logits; 0: draft without the sampler's noise.
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
    _offer_chunk[num_rows, num_chunks](
        trees.requests,
        trees.fed_counts,
        trees.fed_counts.stride(0),
        logits,
        logits.stride(0),
        known_ids,
        *workspace,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        CHUNK=CHUNK,
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
        *workspace,
        num_chunks,
        vocab_limit,
        scale,
        level,
        **flags,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )


def choose_beams(
    trees: DraftTrees,
    level: int,
    block_tables: torch.Tensor,
    block_size: int,
    beams: DraftBeams,
    *,
    num_slots: int,
    scratch_slot: int,
    first_depth: int = 0,
) -> None:
    """Fill ``beams`` with the nodes of depth ``level`` that are to be run.

    Args:
        level: 1 up to the trees' levels - 1.
        block_tables: int32 [trees, blocks]; a tree's beams have the logical slots from its FIRST_SLOT on.
        num_slots: of the cache; a row without a beam, or with a slot that is none of these, writes to ``scratch_slot``.
        first_depth: ancestors above it are left out of the masks: another module's keys and values.
    """
    branches, num_trees = trees.max_branches, trees.requests.shape[0]
    if not 1 <= level < trees.max_depth or len(beams.token_ids) < num_trees * branches or first_depth > level:
        raise ValueError(f"level {level} of {num_trees} trees does not fit the trees or the beams")
    high = state.num_candidates(branches, level)
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
        num_slots,
        scratch_slot,
        beams.token_ids,
        beams.positions,
        beams.slot_mapping,
        beams.context_lens,
        beams.masks,
        beams.sources,
        LEVEL=level,
        FIRST_DEPTH=first_depth,
        K=branches,
        NEW=branches if level == 1 else branches * branches,
        HIGH=high,
        HIGH_PADDED=triton.next_power_of_2(high),
    )


def emit_trees(trees: DraftTrees, out: DraftOutput) -> None:
    """Write the best nodes of each tree: no more than it wants, nor than ``out`` holds of one."""
    num_trees, size = trees.scores.shape
    num_nodes = out.tokens.shape[1]
    if len(out.tokens) < num_trees:
        raise ValueError(f"an output for {len(out.tokens)} of {num_trees} trees")
    padded = triton.next_power_of_2(size)
    _place_nodes[(num_trees,)](
        trees.requests, trees.scores, trees.places, out.num_nodes, size, num_nodes, PADDED=padded
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
