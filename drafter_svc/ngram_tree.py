"""Compiled inner loops of the n-gram drafter: the tree drafted for each row of a batch.

``compile_draft_batch`` gives the one function that a batch calls.

A tree is grown best first. A candidate's weight estimates the chance that the target's text runs through it:

    weight(child) = weight(parent) x what earlier sources left x confidence(matched tokens) x share

Sources of a node's children, in order: the sequence's own earlier text, then the trie's context; at the root the
contexts of all suffixes, longest first. Each leaves ``1 - confidence`` to the next. Within a context the shares follow
from the order: by recency each child gets half of what is left, by frequency its part of the counts. Candidates
below MIN_WEIGHT are not drafted, so short or torn matches take few nodes, and a row without a match takes none.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import numba
import numpy as np
from numpy.typing import NDArray

from drafter_svc import ngram_sequences, ngram_trie
from drafter_svc.ngram_sequences import (
    BY_FREQUENCY,
    GAP,
    LAST,
    MAX_BREADTH,
    MAX_NODES_OF,
    MAX_WINDOW,
    MIN_BREADTH,
    MIN_WINDOW,
    OWN_LENGTH,
    OWN_SCAN,
    SLOT_OF,
    Sequences,
    find_own,
    learn_row,
)
from drafter_svc.ngram_trie import CHILD, COUNT, NEXT, OLDEST_STAMP, TOKEN, Int64, Trie, compiled, find_child
from foretoken.tree import Int32

Float64 = NDArray[np.float64]

# Chance that the latest continuation of the longest match is the next token, by matched tokens: entry w is for w, the
# last for all longer ones. Rounded from Python source code (the standard library's, byte-pair tokens, 300 sequences
# of about 300 known and 128 drafted tokens), where the weights that they give agree with the shares that came true.
CONFIDENCE = (0.0, 0.2, 0.45, 0.6, 0.62, 0.63, 0.64, 0.66, 0.7, 0.74, 0.77, 0.8, 0.82, 0.84, 0.87, 0.9, 0.92)
MIN_WEIGHT = 0.08
# Siblings that the order of frequency looks at, latest first.
SIBLING_SCAN = 32

# Columns of Scratch.grown (tree nodes) and Scratch.candidates. NODE and WINDOW: context in the trie and its matched
# tokens; OWN and OWN_WINDOW: the same token's place in the sequence's own text, or -1, and tokens matched there.
NODE, WINDOW, OWN, OWN_WINDOW, PARENT_INDEX, CANDIDATE_TOKEN = range(6)
NUM_CHILDREN, LEVEL = 4, 5
# Entries of Scratch.sizes.
CANDIDATES, QUEUED = range(2)


class Scratch(NamedTuple):
    """Attributes:
    grown: int32 [max_nodes, 6].
    grown_weights: float64 [max_nodes].
    candidates: int32 [max_nodes * (breadth + 1), 6].
    weights: float64 [same].
    heap: int32 [same]; indices of candidates, the heaviest first.
    sizes: int64 [2]; how many candidates there are, and how many of them are in the heap.
    contexts: int32 [depth]; the trie's node for a row's last ``w`` tokens, or 0.
    scanned: int32 [max(depth, OWN_SCAN, SIBLING_SCAN)].
    """

    grown: Int32
    grown_weights: Float64
    candidates: Int32
    weights: Float64
    heap: Int32
    sizes: Int64
    contexts: Int32
    scanned: Int32


def new_scratch(max_nodes: int, max_breadth: int, depth: int) -> Scratch:
    num_candidates = max_nodes * (max_breadth + 1)
    return Scratch(
        grown=np.zeros((max_nodes, 6), np.int32),
        grown_weights=np.zeros(max_nodes, np.float64),
        candidates=np.zeros((num_candidates, 6), np.int32),
        weights=np.zeros(num_candidates, np.float64),
        heap=np.zeros(num_candidates, np.int32),
        sizes=np.zeros(2, np.int64),
        contexts=np.zeros(depth, np.int32),
        scanned=np.zeros(max(depth, OWN_SCAN, SIBLING_SCAN), np.int32),
    )


@compiled
def heavier(weights: Float64, left: int, right: int) -> bool:
    return bool(weights[left] > weights[right] or (weights[left] == weights[right] and left < right))


@compiled
def push_heap(heap: Int32, size: int, weights: Float64, candidate: int) -> None:
    at = size
    while at > 0 and heavier(weights, candidate, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = candidate


@compiled
def pop_heap(heap: Int32, size: int, weights: Float64) -> int:
    """Remove the heaviest candidate; ``size`` counts it."""
    top: int = heap[0]
    moved, at = heap[size - 1], 0
    while 2 * at + 1 < size - 1:
        child = 2 * at + 1
        if child + 1 < size - 1 and heavier(weights, heap[child + 1], heap[child]):
            child += 1
        if not heavier(weights, heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved
    return top


@compiled
def confidence(window: int) -> float:
    return CONFIDENCE[min(window, len(CONFIDENCE) - 1)]


@compiled
def breadth_at(options: Int64, level: int) -> int:
    """Children allowed: the most at the root, fewer in equal steps, the fewest from level ``max_window`` on."""
    most: int = options[MAX_BREADTH]
    spread = most - options[MIN_BREADTH]
    return int(most - spread * min(level, options[MAX_WINDOW]) // options[MAX_WINDOW])


@compiled
def is_offered(scratch: Scratch, first: int, token: int) -> bool:
    """Whether a candidate from number ``first`` on holds ``token``."""
    for candidate in range(first, scratch.sizes[CANDIDATES]):
        if scratch.candidates[candidate, CANDIDATE_TOKEN] == token:
            return True
    return False


@compiled
def offer(scratch: Scratch, parent: int, token: int, node: int, window: int, weight: float) -> int:
    """Offer a child of tree node ``parent``: its number as a candidate, or -1 if it is too light."""
    candidate: int = scratch.sizes[CANDIDATES]
    queued: int = scratch.sizes[QUEUED]
    if weight < MIN_WEIGHT or candidate == len(scratch.weights):
        return -1
    entry = scratch.candidates[candidate]
    entry[NODE], entry[WINDOW], entry[OWN], entry[OWN_WINDOW] = node, window, -1, 0
    entry[PARENT_INDEX], entry[CANDIDATE_TOKEN] = parent, token
    scratch.weights[candidate] = weight
    push_heap(scratch.heap, queued, scratch.weights, candidate)
    scratch.sizes[CANDIDATES], scratch.sizes[QUEUED] = candidate + 1, queued + 1
    return candidate


@compiled
def scan_children(nodes: Int32, node: int, limit: int, by_frequency: bool, scanned: Int32) -> int:
    """Put the ``limit`` latest children of ``node`` into ``scanned``: how many.

    By frequency they are sorted by their counts, the later of equal ones first.
    """
    count = 0
    child = nodes[node, CHILD]
    while child != 0 and count < limit:
        at = count
        while by_frequency and at > 0 and nodes[scanned[at - 1], COUNT] < nodes[child, COUNT]:
            scanned[at] = scanned[at - 1]
            at -= 1
        scanned[at] = child
        count += 1
        child = nodes[child, NEXT]
    return count


@compiled
def offer_context(
    trie: Trie, scratch: Scratch, options: Int64, first: int, parent: int, node: int, window: int, weight: float
) -> None:
    """Offer the children of a context that no earlier source (from candidate ``first`` on) offered, for ``weight``."""
    nodes, scanned = trie.nodes, scratch.scanned
    by_frequency = options[BY_FREQUENCY] != 0
    breadth = breadth_at(options, scratch.grown[parent, LEVEL])
    count = scan_children(nodes, node, SIBLING_SCAN if by_frequency else breadth, by_frequency, scanned)
    kept, total = 0, 0
    for i in range(count):
        if not is_offered(scratch, first, nodes[scanned[i], TOKEN]):
            scanned[kept] = scanned[i]
            total += nodes[scanned[i], COUNT]
            kept += 1
    left = weight
    for i in range(min(kept, breadth)):
        child = int(scanned[i])
        part = left / 2 if nodes[child, NEXT] != 0 else left
        left -= part
        if by_frequency:
            part = weight * nodes[child, COUNT] / total
        offer(scratch, parent, nodes[child, TOKEN], child, window + 1, part)


@compiled
def offer_own(trie: Trie, scratch: Scratch, parent: int, own: Int32, period: int, node: int, window: int) -> None:
    """Offer what follows in the row's own text; ``node`` and ``window`` are the parent's context in the trie."""
    place = scratch.grown[parent, OWN] + 1
    if place == len(own):
        # Beyond the end the text is taken to repeat itself.
        place -= period
    token = own[place]
    if token == GAP:
        return
    child = int(find_child(trie, node, token)) if node != 0 else 0
    if parent == 0:
        # The longest context that knows the token goes on with it.
        window = len(scratch.contexts)
        while child == 0 and window > 1:
            window -= 1
            node = int(scratch.contexts[window])
            child = int(find_child(trie, node, token)) if node != 0 else 0
    matched = int(scratch.grown[parent, OWN_WINDOW])
    candidate = offer(scratch, parent, token, child, window + 1, scratch.grown_weights[parent] * confidence(matched))
    if candidate >= 0:
        scratch.candidates[candidate, OWN] = place
        scratch.candidates[candidate, OWN_WINDOW] = matched + 1


@compiled
def expand(trie: Trie, scratch: Scratch, options: Int64, at: int, own: Int32, period: int) -> None:
    """Offer the children of tree node ``at``."""
    weight, first = scratch.grown_weights[at], scratch.sizes[CANDIDATES]
    node, window = int(scratch.grown[at, NODE]), int(scratch.grown[at, WINDOW])
    if window == len(scratch.contexts):
        node, window = int(trie.nodes[node, CHILD]), window - 1
    if scratch.grown[at, OWN] >= 0:
        offer_own(trie, scratch, at, own, period, node, window)
        if scratch.sizes[CANDIDATES] > first:
            weight *= 1 - confidence(int(scratch.grown[at, OWN_WINDOW]))
    if at != 0:
        if node != 0:
            offer_context(trie, scratch, options, first, at, node, window, weight * confidence(window))
        return
    for w in range(len(scratch.contexts) - 1, options[MIN_WINDOW] - 1, -1):
        node = int(scratch.contexts[w])
        if node != 0 and trie.nodes[node, CHILD] != 0 and weight >= MIN_WEIGHT:
            offer_context(trie, scratch, options, first, at, node, w, weight * confidence(w))
            weight *= 1 - confidence(w)


@compiled
def start_tree(trie: Trie, sequences: Sequences, scratch: Scratch, options: Int64, slot: int) -> int:
    """Fill the contexts and the root of a slot's tree; the period of its text if that goes on as it matched."""
    for w in range(len(scratch.contexts)):
        alive = sequences.stamps[slot, w] >= trie.counters[OLDEST_STAMP]
        scratch.contexts[w] = sequences.ends[slot, w] if alive else 0
    place, window = find_own(sequences, slot, options, scratch.scanned)
    root = scratch.grown[0]
    root[NODE], root[WINDOW], root[OWN], root[OWN_WINDOW] = 0, 0, place, window
    root[NUM_CHILDREN], root[LEVEL] = 0, 0
    scratch.grown_weights[0] = 1.0
    scratch.sizes[CANDIDATES], scratch.sizes[QUEUED] = 0, 0
    last: int = sequences.state[slot, OWN_LENGTH] - 1
    return last - place


@compiled
def add_heaviest(scratch: Scratch, options: Int64, size: int, tokens: Int32, parents: Int32) -> bool:
    """Add the heaviest candidate whose parent may have one more child as tree node ``size``, if there is one."""
    grown = scratch.grown
    while scratch.sizes[QUEUED] > 0:
        candidate = pop_heap(scratch.heap, scratch.sizes[QUEUED], scratch.weights)
        scratch.sizes[QUEUED] -= 1
        entry = scratch.candidates[candidate]
        parent = entry[PARENT_INDEX]
        if grown[parent, NUM_CHILDREN] < breadth_at(options, grown[parent, LEVEL]):
            grown[parent, NUM_CHILDREN] += 1
            tokens[size], parents[size] = entry[CANDIDATE_TOKEN], parent
            for column in range(NUM_CHILDREN):
                grown[size, column] = entry[column]
            grown[size, NUM_CHILDREN], grown[size, LEVEL] = 0, grown[parent, LEVEL] + 1
            scratch.grown_weights[size] = scratch.weights[candidate]
            return True
    return False


@compiled
def grow_tree(
    trie: Trie, sequences: Sequences, scratch: Scratch, options: Int64, slot: int, tokens: Int32, parents: Int32
) -> int:
    """Write the nodes below the root of a slot's tree, at most as many as fit: how many nodes there are."""
    period = start_tree(trie, sequences, scratch, options, slot)
    own = sequences.tokens[slot, : sequences.state[slot, OWN_LENGTH]]
    size, more = 1, True
    while more and size < len(tokens):
        expand(trie, scratch, options, size - 1, own, period)
        more = add_heaviest(scratch, options, size, tokens, parents)
        size += more
    return size


@compiled
def draft_rows(
    trie: Trie,
    sequences: Sequences,
    scratch: Scratch,
    options: Int64,
    columns: Int64,
    starts: Int32,
    new_tokens: Int32,
    node_starts: Int32,
    tokens: Int32,
    parents: Int32,
) -> int:
    """Learn the new tokens of all rows, then write a tree for each: how many rows got more than a root.

    A slot or an offset out of range is a row that is neither learnt nor drafted for.
    """
    num_drafted = 0
    for row in range(len(columns)):
        low, high = starts[row], starts[row + 1]
        if not 0 <= low <= high <= len(new_tokens) or not 0 <= columns[row, SLOT_OF] < len(sequences.state):
            columns[row, SLOT_OF] = -1
        else:
            learn_row(trie, sequences, options, columns[row], new_tokens[low:high], scratch.scanned)
    node_starts[0] = 0
    for row in range(len(columns)):
        low, slot = node_starts[row], columns[row, SLOT_OF]
        high = low + min(max(columns[row, MAX_NODES_OF], 1), len(scratch.grown))
        tokens[low] = sequences.state[slot, LAST] if slot >= 0 else 0
        parents[low] = -1
        size = 1
        if slot >= 0 and high > low + 1:
            size = grow_tree(trie, sequences, scratch, options, slot, tokens[low:high], parents[low:high])
            num_drafted += size > 1
        node_starts[row + 1] = low + size
    return num_drafted


@functools.cache
def compile_draft_batch() -> Callable[..., int]:
    """``draft_rows`` in nopython mode, without the GIL, cached beside this file or, if that is read-only, per user.

    numba takes a cached function for fresh as long as its own file and its closure are unchanged: so the digest of
    all three source files is in the closure.
    """
    files = (ngram_trie.__file__, ngram_sequences.__file__, __file__)
    digest = zlib.crc32(b"".join(Path(file).read_bytes() for file in files))

    def draft_batch(
        trie: Trie,
        sequences: Sequences,
        scratch: Scratch,
        options: Int64,
        columns: Int64,
        starts: Int32,
        new_tokens: Int32,
        node_starts: Int32,
        tokens: Int32,
        parents: Int32,
    ) -> int:
        assert digest >= 0
        return draft_rows(trie, sequences, scratch, options, columns, starts, new_tokens, node_starts, tokens, parents)

    try:
        batch = numba.njit(nogil=True, cache=True)(draft_batch)
    except RuntimeError:
        # numba finds no folder that it may write to: compiled anew by each process.
        batch = numba.njit(nogil=True)(draft_batch)
    return cast(Callable[..., int], batch)
