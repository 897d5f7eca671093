"""Grow a batch of draft trees: children of the beams, the next beams, and the best nodes of all.

These are the trees of EAGLE-2 (Li et al., arXiv 2406.16858). At each depth every beam offers its
most likely children. The best of them by cumulative log-probability become the next beams. At the
end the best of all offered candidates become the tree. A beam whose children cannot be in the final
tree, because enough better candidates exist already, is not run. A child's score is never above its
parent's, so this changes no tree.

With a temperature above zero, a child's value is its logit over temperature plus the sampler's own
noise, keyed by seed, position, choice index and target token id (foretoken/noise.py). Its score is
the log-softmax of these values over a scale: the chance that this very noise picks it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu import sample
from foretoken_kernels.cpu.compile import compiled, inlined
from foretoken_kernels.cpu.simd import LANES, add, load, maximum, multiply, reduce_add, reduce_max, splat, subtract
from foretoken_kernels.cpu.vector_math import exp

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

# Beams that one tree can run through the draft model: the bits of one mask word.
MAX_BEAM_NODES = 64
# Columns of Trees.shapes, Trees.filters and Trees.counts.
LENGTH, MAX_NODES, MAX_DEPTH, MAX_BRANCHES, CHOICE_INDEX, TOP_K = range(6)
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_CANDIDATES, NUM_FED, LEVEL_START, FIRST_KV_SLOT = range(4)
# Columns of Trees.nodes: target token id; parent (a candidate, or -1 for the root); depth; the row
# of the last pass that offered it; its index among the tree's beams, or -1.
TOKEN, PARENT, DEPTH, SOURCE, FED = range(5)
# With the sampler's noise, tokens whose chance is below e**-MARGIN of the best one's are left out.
# This avoids most of a vocabulary's logarithms.
MARGIN = 6.0

_NEVER = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-3.0e38)


class Trees(NamedTuple):
    """State of a batch of growing trees, allocated once. ``rows`` are the rows of the request.

    Attributes:
        shapes: int32 [rows, 6].
        filters: float32 [rows, 3].
        seeds: uint64 [rows].
        counts: int32 [rows, 4].
        nodes: int32 [rows, candidates, 5].
        scores: float64 [rows, candidates]; cumulative log-probabilities.
        masks: uint64 [rows, MAX_BEAM_NODES]; each beam's bit and the bits of its ancestors.
        heap: int32 [candidates]; scratch.
        chosen: int32 [candidates]; node index + 1 in the final tree, 0 for none.
        values: float32 [draft vocabulary]; scratch.
        words: uint64 [draft vocabulary]; random words of the current row and position.
        stamps: int64 [draft vocabulary + 1]; a word is current if its stamp equals the last entry,
            which counts up.
        best: int32 [branches]; scratch.
        best_values: float32 [branches]; scratch.
    """

    shapes: Int32
    filters: Float32
    seeds: UInt64
    counts: Int32
    nodes: Int32
    scores: Float64
    masks: UInt64
    heap: Int32
    chosen: Int32
    values: Float32
    words: UInt64
    stamps: NDArray[np.int64]
    best: Int32
    best_values: Float32


class Beams(NamedTuple):
    """Rows of the next pass, in the arrays of a ForwardBatch, and the row that offered each.

    Attributes:
        rows, nodes: int32 [beams]; tree and candidate.
        sources: int32 [beams]; the row of the last pass that offered the node.
        token_ids, positions, kv_slots, context_lens: int32 [beams]; ``kv_slots`` are KV slots.
        masks: uint64 [beams, 1].
    """

    rows: Int32
    nodes: Int32
    sources: Int32
    token_ids: Int32
    positions: Int32
    kv_slots: Int32
    context_lens: Int32
    masks: UInt64


def new_trees(max_rows: int, max_nodes: int, draft_vocab_size: int) -> Trees:
    """Return empty trees for ``max_rows`` rows.

    Args:
        max_nodes: nodes of one tree, root included. No node has more children than the tree has
            other nodes.
    """
    branches = max(max_nodes - 1, 1)
    candidates = (1 + MAX_BEAM_NODES) * branches
    return Trees(
        shapes=np.zeros((max_rows, 6), np.int32),
        filters=np.zeros((max_rows, 3), np.float32),
        seeds=np.zeros(max_rows, np.uint64),
        counts=np.zeros((max_rows, 4), np.int32),
        nodes=np.zeros((max_rows, candidates, 5), np.int32),
        scores=np.zeros((max_rows, candidates), np.float64),
        masks=np.zeros((max_rows, MAX_BEAM_NODES), np.uint64),
        heap=np.zeros(candidates, np.int32),
        chosen=np.zeros(candidates, np.int32),
        values=np.zeros(draft_vocab_size, np.float32),
        words=np.zeros(draft_vocab_size, np.uint64),
        stamps=np.zeros(draft_vocab_size + 1, np.int64),
        best=np.zeros(branches, np.int32),
        best_values=np.zeros(branches, np.float32),
    )


def new_beams(max_rows: int) -> Beams:
    rows, nodes, sources, token_ids, positions, kv_slots, context_lens = np.zeros((7, max_rows), np.int32)
    masks = np.zeros((max_rows, 1), np.uint64)
    return Beams(rows, nodes, sources, token_ids, positions, kv_slots, context_lens, masks)


@inlined
def _sum_of_exps(x: Any, at: int, size: int, largest: np.float32, factor: np.float32) -> float:
    """Return the sum of exp((x - largest) * factor); NaN adds nothing."""
    whole = size // LANES * LANES
    lanes = splat(_ZERO)
    for i in range(0, whole, LANES):
        lanes = add(lanes, exp(multiply(subtract(load(x, at + i), splat(largest)), splat(factor))))
    total = np.float64(reduce_add(lanes))
    for i in range(whole, size):
        if x[at + i] > _NEVER:
            total += math.exp(np.float64((x[at + i] - largest) * factor))
    return total


@inlined
def _take_best(x: Any, at: int, size: int, most: int, best: Any, best_values: Any) -> int:
    """Write the ids of the ``most`` largest values to ``best``, best first; return their number.

    Of equal values the lower id comes first. Values of -inf do not count.
    """
    count = 0
    least = _NEVER
    for low in range(0, size, LANES):
        high = min(low + LANES, size)
        if high - low == LANES and not reduce_max(maximum(load(x, at + low), splat(_LOWEST))) > least:
            continue
        for i in range(low, high):
            value = x[at + i]
            if not value > least:
                continue
            place = count if count < most else most - 1
            while place > 0 and value > best_values[place - 1]:
                best[place] = best[place - 1]
                best_values[place] = best_values[place - 1]
                place -= 1
            best[place] = i
            best_values[place] = value
            count = min(count + 1, most)
            if count == most:
                least = best_values[most - 1]
    return count


@inlined
def _filter_logits(trees: Any, row: int, logits: Any, at: int, size: int) -> None:
    """Write logits over temperature to ``trees.values``, filtered as in the sampler."""
    values = trees.values[:size]
    temperature = trees.filters[row, TEMPERATURE]
    for i in range(size):
        logit = logits[at + i]
        values[i] = _NEVER if math.isnan(logit) else logit / temperature
    top_p, min_p = np.float64(trees.filters[row, TOP_P]), np.float64(trees.filters[row, MIN_P])
    sample.keep_likely(values, trees.shapes[row, TOP_K], top_p, min_p)


@inlined
def _draw_words(words: Any, stamps: Any, target_ids: Any, i: int, key: Any) -> None:
    """Draw the sampler's random word of draft id ``i``, and the other words of the same counter.

    Args:
        key: (seed, position of the token being sampled, choice index).
    """
    has_map = len(target_ids) > 0
    token = np.int64(target_ids[i]) if has_map else i
    drawn = sample.philox4x32(
        np.uint64(token // 4),
        np.uint64(key[1]),
        np.uint64(key[2]),
        np.uint64(0),
        key[0] & np.uint64(0xFFFFFFFF),
        key[0] >> np.uint64(32),
    )
    if has_map:
        words[i] = drawn[token % 4]
        stamps[i] = stamps[len(words)]
        return
    low = i // 4 * 4
    for lane in range(min(4, len(words) - low)):
        words[low + lane] = drawn[lane]
        stamps[low + lane] = stamps[len(words)]


@inlined
def _add_noise(values: Any, words: Any, stamps: Any, target_ids: Any, key: Any, margin: np.float32) -> None:
    """Add noise to ``values``; set values more than ``margin`` below the best to -inf.

    This skips most logarithms. The arrays are separate arguments: passing all of Trees for each
    token took ten times as long.
    """
    bounds, stamp = sample._GUMBEL_BOUNDS, stamps[len(words)]
    first = sample.argmax_row(values, len(values))
    if values[first] == _NEVER:
        return
    if stamps[first] != stamp:
        _draw_words(words, stamps, target_ids, first, key)
    best = values[first] + sample.gumbel_from_word(words[first])
    for i in range(len(values)):
        value = values[i]
        values[i] = _NEVER
        if value + bounds[255] < best - margin:
            continue
        if stamps[i] != stamp:
            _draw_words(words, stamps, target_ids, i, key)
        if value + bounds[words[i] >> np.uint64(24)] < best - margin:
            continue
        value += sample.gumbel_from_word(words[i])
        values[i] = value
        best = max(best, value)
    for i in range(len(values)):
        if values[i] < best - margin:
            values[i] = _NEVER


@inlined
def _offer(  # noqa: PLR0913 - one row of offer_children
    trees: Any, row: int, parent: int, source: int, logits: Any, at: int, size: int, target_ids: Any, scale: float
) -> None:
    """Add the best children of one node as candidates of its tree."""
    shape, counts = trees.shapes[row], trees.counts[row]
    depth = 1 if parent < 0 else trees.nodes[row, parent, DEPTH] + 1
    temperature = trees.filters[row, TEMPERATURE]
    most = min(shape[MAX_BRANCHES], len(trees.best), trees.nodes.shape[1] - counts[NUM_CANDIDATES])
    x, start, factor = logits, at, _ONE
    if temperature > _ZERO:
        _filter_logits(trees, row, logits, at, size)
        x, start = trees.values, 0
        if scale > 0.0:
            factor = np.float32(np.float64(temperature) / scale)
            margin = np.float32(MARGIN / np.float64(factor))
            key = (trees.seeds[row], shape[LENGTH] + depth - 1, shape[CHOICE_INDEX])
            _add_noise(trees.values[:size], trees.words, trees.stamps, target_ids, key, margin)
    if most < 1:
        return
    found = _take_best(x, start, size, most, trees.best, trees.best_values)
    if found == 0:
        return
    largest = trees.best_values[0]
    if largest == np.float32(np.inf):
        return
    log_sum = math.log(_sum_of_exps(x, start, size, largest, factor))
    above = 0.0 if parent < 0 else trees.scores[row, parent]
    for i in range(found):
        candidate = counts[NUM_CANDIDATES]
        node = trees.nodes[row, candidate]
        draft_id = trees.best[i]
        node[TOKEN] = target_ids[draft_id] if len(target_ids) > 0 else draft_id
        node[PARENT], node[DEPTH], node[SOURCE], node[FED] = parent, depth, source, -1
        score = np.float64((trees.best_values[i] - largest) * factor) - log_sum
        trees.scores[row, candidate] = above + min(score, 0.0)
        counts[NUM_CANDIDATES] = candidate + 1


@inlined
def _is_kept(trees: Any, row: int, candidate: int) -> bool:
    """Return whether a candidate is among the best so far that the tree has room for."""
    scores = trees.scores[row]
    room = trees.shapes[row, MAX_NODES] - 1
    ahead = 0
    for other in range(trees.counts[row, NUM_CANDIDATES]):
        ahead += scores[other] > scores[candidate] or (scores[other] == scores[candidate] and other < candidate)
    return bool(ahead < room)


@inlined
def _next_beams(trees: Any, row: int, depth: int, block_tables: Any, block_size: int, beams: Any, count: int) -> int:
    """Append the best new candidates of one tree to ``beams``; return the new number of rows."""
    shape, counts = trees.shapes[row], trees.counts[row]
    low, high = counts[LEVEL_START], counts[NUM_CANDIDATES]
    counts[LEVEL_START] = high
    if depth >= shape[MAX_DEPTH]:
        return count
    for _ in range(shape[MAX_BRANCHES]):
        best = -1
        for candidate in range(low, high):
            better = best < 0 or trees.scores[row, candidate] > trees.scores[row, best]
            if trees.nodes[row, candidate, FED] < 0 and better:
                best = candidate
        if best < 0 or counts[NUM_FED] == MAX_BEAM_NODES or not _is_kept(trees, row, best):
            break
        fed = counts[NUM_FED]
        counts[NUM_FED] = fed + 1
        node = trees.nodes[row, best]
        node[FED] = fed
        mask = np.uint64(1) << np.uint64(fed)
        if node[PARENT] >= 0:
            mask |= trees.masks[row, trees.nodes[row, node[PARENT], FED]]
        trees.masks[row, fed] = mask
        kv_slot = counts[FIRST_KV_SLOT] + fed
        beams.rows[count], beams.nodes[count], beams.sources[count] = row, best, node[SOURCE]
        beams.token_ids[count] = node[TOKEN]
        beams.positions[count] = shape[LENGTH] - 1 + depth
        beams.kv_slots[count] = block_tables[row, kv_slot // block_size] * block_size + kv_slot % block_size
        beams.context_lens[count] = shape[LENGTH]
        beams.masks[count, 0] = mask
        count += 1
    return count


@compiled
def offer_children(  # noqa: PLR0913 - compiled code takes its arrays one by one
    trees: Trees,
    logits: Float32,
    draft_vocab_size: int,
    vocab_limit: int,
    target_ids: Int32,
    rows: Int32,
    nodes: Int32,
    first_source: int,
    scale: float,
) -> None:
    """Let each row of logits offer the best children of its node.

    Args:
        logits: float32, flat [len(rows), draft_vocab_size].
        vocab_limit: draft ids below this may be drafted.
        target_ids: int32 [draft_vocab_size]; the target's id of each draft id; empty if they are
            equal.
        rows, nodes: int32; tree and candidate of each row of logits; candidate -1 is the root.
        first_source: SOURCE of the first row's children; later rows count up from it.
        scale: scale of the values in the coupled score, in units of logits; 0: draft without the
            sampler's noise.
    """
    last_row, last_depth = -1, -1
    for i in range(len(rows)):
        row = rows[i]
        depth = 1 if nodes[i] < 0 else trees.nodes[row, nodes[i], DEPTH] + 1
        if row != last_row or depth != last_depth:
            trees.stamps[len(trees.words)] += 1
            last_row, last_depth = row, depth
        _offer(trees, row, nodes[i], first_source + i, logits, i * draft_vocab_size, vocab_limit, target_ids, scale)


@inlined
def choose_beams(trees: Trees, rows: Int32, depth: int, block_tables: Int32, block_size: int, beams: Beams) -> int:
    """Fill ``beams`` with the nodes of ``depth`` to run in the trees ``rows``; return their number.

    ``Trees.counts[:, FIRST_KV_SLOT]`` is the logical KV slot of a tree's first beam. The block
    table must cover MAX_BEAM_NODES KV slots from there on.
    """
    count = 0
    for i in range(len(rows)):
        count = _next_beams(trees, rows[i], depth, block_tables, block_size, beams, count)
    return count


@inlined
def keep_module_ancestors(trees: Trees, beams: Beams, count: int, first_depth: int) -> None:
    """Remove ancestors above ``first_depth`` from the beams' masks.

    Another module computed their keys and values.
    """
    for i in range(count):
        row, node = beams.rows[i], np.int64(beams.nodes[i])
        mask = np.uint64(0)
        while node >= 0 and trees.nodes[row, node, DEPTH] >= first_depth:
            mask |= np.uint64(1) << np.uint64(trees.nodes[row, node, FED])
            node = np.int64(trees.nodes[row, node, PARENT])
        beams.masks[i, 0] = mask


@inlined
def _is_ahead(scores: Any, left: int, right: int) -> bool:
    return bool(scores[left] > scores[right] or (scores[left] == scores[right] and left < right))


@inlined
def _sift_down(heap: Any, size: int, place: int, scores: Any) -> None:
    moved = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _is_ahead(scores, heap[child + 1], heap[child]):
            child += 1
        if not _is_ahead(scores, heap[child], moved):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = moved


@inlined
def _emit_tree(trees: Any, row: int, low: int, tokens: Any, parents: Any, scores: Any) -> int:
    """Write a tree's root and best candidates from ``low`` on; return the next tree's start."""
    total = trees.counts[row, NUM_CANDIDATES]
    heap, ranks, chosen = trees.heap, trees.scores[row], trees.chosen
    for candidate in range(total):
        heap[candidate] = candidate
        chosen[candidate] = 0
    for place in range(total // 2 - 1, -1, -1):
        _sift_down(heap, total, place, ranks)
    for taken in range(min(total, trees.shapes[row, MAX_NODES] - 1)):
        chosen[heap[0]] = 1
        heap[0] = heap[total - 1 - taken]
        _sift_down(heap, total - 1 - taken, 0, ranks)
    size = 1
    for candidate in range(total):
        if chosen[candidate] == 0:
            continue
        node = trees.nodes[row, candidate]
        tokens[low + size] = node[TOKEN]
        parents[low + size] = 0 if node[PARENT] < 0 else chosen[node[PARENT]] - 1
        scores[low + size] = np.float32(ranks[candidate])
        size += 1
        chosen[candidate] = size
    return low + size


@compiled
def emit_trees(trees: Trees, roots: Int32, node_starts: Int32, tokens: Int32, parents: Int32, scores: Float32) -> None:
    """Write the best nodes of each tree, ancestors before descendants.

    Args:
        roots: int32 [rows]; each row's last committed token.
        node_starts: int32 [rows + 1]; written: the first node of each tree.
        tokens, parents, scores: int32, int32, float32 [nodes]; written. They must have room for the
            nodes of all rows.
    """
    node_starts[0] = 0
    for row in range(len(roots)):
        low = node_starts[row]
        tokens[low], parents[low], scores[low] = roots[row], -1, _ZERO
        node_starts[row + 1] = _emit_tree(trees, row, low, tokens, parents, scores)
