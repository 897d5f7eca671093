"""Compiled loops of the n-gram drafter: a tree's nodes, and candidates for the next one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import inlined_uncounted
from numpy.typing import NDArray

from drafter_svc.ngram.corpora import EXTERNAL_SCAN
from drafter_svc.ngram.sequences import OWN_SCAN
from drafter_svc.ngram.trie import Int64
from foretoken.tree import Int32

Float64 = NDArray[np.float64]

MIN_WEIGHT = 0.08
# Siblings that are compared by frequency, latest first.
SIBLING_SCAN = 32

# Columns of Scratch.grown (tree nodes) and Scratch.candidates. NODE and WINDOW: the context in the
# trie and how many tokens match it. PREDICTED, OWN and EXTERNAL: the token's place in the
# prediction, in the sequence's own text and in the corpora; the column after each counts the tokens
# that match there. If there is no place, OWN or EXTERNAL is -1, or PREDICTED_WINDOW is 0.
NODE, WINDOW, PREDICTED, PREDICTED_WINDOW, OWN, OWN_WINDOW, EXTERNAL, EXTERNAL_WINDOW = range(8)
PARENT_INDEX, CANDIDATE_TOKEN = 8, 9
NUM_CHILDREN, LEVEL = 8, 9
NUM_COLUMNS = 10
# Entries of Scratch.sizes.
CANDIDATES, QUEUED = range(2)


class Scratch(NamedTuple):
    """Attributes:
    grown: int32 [max_nodes, NUM_COLUMNS].
    grown_weights: float64 [max_nodes].
    candidates: int32 [max_nodes * (breadth + 3) + breadth, NUM_COLUMNS].
    weights: float64 [same].
    heap: int32 [same]; heap of candidates' indices, the heaviest at its top.
    sizes: int64 [2]; number of candidates, and number of them in the heap.
    tallies: int64 [EXTERNAL_SCAN]; how often each continuation was found.
    contexts: int32 [depth]; the trie's node for a row's last ``w`` tokens, or 0.
    scanned: int32 [max(2 * depth, OWN_SCAN, SIBLING_SCAN, EXTERNAL_SCAN)].
    """

    grown: Int32
    grown_weights: Float64
    candidates: Int32
    weights: Float64
    heap: Int32
    sizes: Int64
    tallies: Int64
    contexts: Int32
    scanned: Int32


def new_scratch(max_nodes: int, max_breadth: int, depth: int) -> Scratch:
    """Allocate the working memory of one tree."""
    num_candidates = max_nodes * (max_breadth + 3) + max_breadth
    return Scratch(
        grown=np.zeros((max_nodes, NUM_COLUMNS), np.int32),
        grown_weights=np.zeros(max_nodes, np.float64),
        candidates=np.zeros((num_candidates, NUM_COLUMNS), np.int32),
        weights=np.zeros(num_candidates, np.float64),
        heap=np.zeros(num_candidates, np.int32),
        sizes=np.zeros(2, np.int64),
        tallies=np.zeros(EXTERNAL_SCAN, np.int64),
        contexts=np.zeros(depth, np.int32),
        scanned=np.zeros(max(2 * depth, OWN_SCAN, SIBLING_SCAN, EXTERNAL_SCAN), np.int32),
    )


@inlined_uncounted
def heavier(weights: Float64, left: int, right: int) -> bool:
    """Return whether candidate ``left`` is heavier than ``right``, or as heavy and older."""
    return bool(weights[left] > weights[right] or (weights[left] == weights[right] and left < right))


@inlined_uncounted
def push_heap(heap: Int32, size: int, weights: Float64, candidate: int) -> None:
    """Add a candidate to a heap of ``size`` candidates."""
    at = size
    while at > 0 and heavier(weights, candidate, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = candidate


@inlined_uncounted
def pop_heap(heap: Int32, size: int, weights: Float64) -> int:
    """Remove and return the heaviest candidate of a heap of ``size`` candidates."""
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


@inlined_uncounted
def find_offered(scratch: Scratch, first: int, token: int) -> int:
    """Return the candidate with ``token``, from number ``first`` on, or -1."""
    for candidate in range(first, scratch.sizes[CANDIDATES]):
        if scratch.candidates[candidate, CANDIDATE_TOKEN] == token:
            return candidate
    return -1


@inlined_uncounted
def offer(scratch: Scratch, parent: int, token: int, node: int, window: int, weight: float) -> int:
    """Offer a child of tree node ``parent``.

    Return its number as a candidate, or -1 if it is too light.
    """
    candidate: int = scratch.sizes[CANDIDATES]
    queued: int = scratch.sizes[QUEUED]
    if weight < MIN_WEIGHT or candidate == len(scratch.weights):
        return -1
    entry = scratch.candidates[candidate]
    entry[NODE], entry[WINDOW] = node, window
    entry[PREDICTED_WINDOW], entry[OWN], entry[EXTERNAL] = 0, -1, -1
    entry[PARENT_INDEX], entry[CANDIDATE_TOKEN] = parent, token
    scratch.weights[candidate] = weight
    push_heap(scratch.heap, queued, scratch.weights, candidate)
    scratch.sizes[CANDIDATES], scratch.sizes[QUEUED] = candidate + 1, queued + 1
    return candidate
