"""Compiled loops of the n-gram drafter: the draft tree of each row of a batch.

``draft_rows`` is the one function that a batch calls.

A tree grows best first. A candidate's weight estimates the chance that the target's text runs
through it:

    weight(child) = weight(parent) x rest of earlier sources x confidence(matched tokens) x share

A node's children come from these sources, in this order: the client's prediction, the sequence's
own earlier text, the trie's context (at the root the contexts of all suffixes, longest first), the
corpora. Each source leaves ``1 - confidence`` to the next. Within a context, each child gets half
of the rest if the order is by recency, or its part of the counts if it is by frequency. Candidates
below MIN_WEIGHT are not drafted: short or broken matches take few nodes, and a row without a match
takes none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import compiled_uncounted, inlined_uncounted
from numpy.typing import NDArray

from drafter_svc.ngram.candidates import (
    CANDIDATE_TOKEN,
    CANDIDATES,
    EXTERNAL,
    EXTERNAL_WINDOW,
    LEVEL,
    MIN_WEIGHT,
    NODE,
    NUM_CHILDREN,
    OWN,
    OWN_WINDOW,
    PARENT_INDEX,
    PREDICTED,
    PREDICTED_WINDOW,
    QUEUED,
    SIBLING_SCAN,
    WINDOW,
    Scratch,
    find_offered,
    offer,
    pop_heap,
)
from drafter_svc.ngram.corpora import SortedCorpora, find_external, rank_continuations
from drafter_svc.ngram.sequences import (
    BATCH_SLOT_OF,
    BY_FREQUENCY,
    LAST,
    MAX_BRANCH_OF,
    MAX_BREADTH,
    MAX_DEPTH_OF,
    MAX_NODES_OF,
    MAX_WINDOW,
    MIN_BREADTH,
    MIN_WINDOW,
    OWN_LENGTH,
    PREDICTED_LENGTH,
    Sequences,
    align_prediction,
    find_own,
    learn_row,
)
from drafter_svc.ngram.trie import (
    CHILD,
    GAP,
    OLDEST_STAMP,
    Int64,
    Trie,
    count_of,
    find_child,
    first_child,
    next_sibling,
    suffix_of,
    token_of,
)
from foretoken.tree import Int32

Float32 = NDArray[np.float32]

# Chance that the latest continuation of the longest match is the next token: entry w is for w
# matched tokens, the last one for all longer matches. Measured on Python source code (the standard
# library's, byte-pair tokens, 300 sequences of about 300 known and 128 drafted tokens) and rounded;
# with them, weights agree with the shares of drafts that came true.
CONFIDENCE = (0.0, 0.2, 0.45, 0.6, 0.62, 0.63, 0.64, 0.66, 0.7, 0.74, 0.77, 0.8, 0.82, 0.84, 0.87, 0.9, 0.92)


class SentRows(NamedTuple):
    """What the verifier sends for a batch. Attributes:
    columns: int64 [rows, 8]; see BATCH_SLOT_OF in sequences.py.
    starts, new_tokens: int32 [rows + 1], int32 [any].
    prediction_starts, prediction: int32 [rows + 1], int32 [any].
    """

    columns: Int64
    starts: Int32
    new_tokens: Int32
    prediction_starts: Int32
    prediction: Int32


class Drafted(NamedTuple):
    """The trees of a batch, written by the compiled code. Attributes:
    node_starts: int32 [rows + 1].
    tokens, parents: int32 [rows * max_nodes].
    scores: float32 [rows * max_nodes]; logarithms of the weights.
    """

    node_starts: Int32
    tokens: Int32
    parents: Int32
    scores: Float32


class Tree(NamedTuple):
    """The part of ``Drafted`` that one tree is written to: its arrays, without ``node_starts``."""

    tokens: Int32
    parents: Int32
    scores: Float32


class RowTexts(NamedTuple):
    """The texts of one row. Its nodes hold places in them. Attributes:
    predicted: int32 [any]; the client's prediction.
    own: int32 [any]; the sequence's own text.
    period: number of tokens after which the own text would repeat itself.
    """

    predicted: Int32
    own: Int32
    period: int


@inlined_uncounted
def confidence(window: int) -> float:
    """Return the CONFIDENCE of a match of ``window`` tokens."""
    return CONFIDENCE[min(window, len(CONFIDENCE) - 1)]


@inlined_uncounted
def breadth_at(options: Int64, level: int) -> int:
    """Return how many children a node may have: fewer from level to level, until ``max_window``."""
    most: int = options[MAX_BREADTH]
    spread = most - options[MIN_BREADTH]
    return int(most - spread * min(level, options[MAX_WINDOW]) // options[MAX_WINDOW])


@inlined_uncounted
def scan_children(trie: Trie, node: int, limit: int, by_frequency: bool, scanned: Int32) -> int:
    """Put the ``limit`` latest children of ``node`` into ``scanned``. Return how many.

    With ``by_frequency`` they are sorted by count; of equal counts the latest comes first.
    """
    count = 0
    child = first_child(trie, node)
    while child != 0 and count < limit:
        at = count
        while by_frequency and at > 0 and count_of(trie, scanned[at - 1]) < count_of(trie, child):
            scanned[at] = scanned[at - 1]
            at -= 1
        scanned[at] = child
        count += 1
        child = next_sibling(trie, child)
    return count


@inlined_uncounted
def offer_context(
    trie: Trie, scratch: Scratch, options: Int64, first: int, parent: int, node: int, window: int, weight: float
) -> None:
    """Offer the children of a context, except those already offered from candidate ``first`` on."""
    scanned = scratch.scanned
    by_frequency = options[BY_FREQUENCY] != 0
    breadth = breadth_at(options, scratch.grown[parent, LEVEL])
    count = scan_children(trie, node, SIBLING_SCAN if by_frequency else breadth, by_frequency, scanned)
    kept, total = 0, 0
    for i in range(count):
        if find_offered(scratch, first, token_of(trie, scanned[i])) < 0:
            scanned[kept] = scanned[i]
            total += count_of(trie, scanned[i])
            kept += 1
    left = weight
    for i in range(min(kept, breadth)):
        child = int(scanned[i])
        part = left / 2 if next_sibling(trie, child) != 0 else left
        left -= part
        if by_frequency:
            part = weight * count_of(trie, child) / total
        offer(scratch, parent, token_of(trie, child), child, window + 1, part)


@inlined_uncounted
def child_context(trie: Trie, scratch: Scratch, parent: int, node: int, window: int, token: int) -> tuple[int, int]:
    """Find ``token`` below the parent's context ``node`` of ``window`` tokens.

    Return its node, or 0, and its window.

    At the root the longest context that knows the token is taken.
    """
    child = int(find_child(trie, node, token)) if node != 0 else 0
    if parent == 0:
        window = len(scratch.contexts)
        while child == 0 and window > 1:
            window -= 1
            node = int(scratch.contexts[window])
            child = int(find_child(trie, node, token)) if node != 0 else 0
    return child, window + 1


@inlined_uncounted
def offer_text(
    trie: Trie,
    scratch: Scratch,
    first: int,
    context: tuple[int, int, int],
    column: int,
    place: int,
    token: int,
    weight: float,
) -> float:
    """Offer the ``token`` at ``place`` of a text. Return the weight that is left for other sources.

    ``column``: holds places in this text; ``context``: the parent, its node in the trie and its
    window. A token that an earlier source offered gets this place too.
    """
    if token == GAP:
        return weight
    parent = context[0]
    matched = int(scratch.grown[parent, column + 1])
    candidate = find_offered(scratch, first, token)
    if candidate < 0:
        child, window = child_context(trie, scratch, parent, context[1], context[2], token)
        candidate = offer(scratch, parent, token, child, window, weight * confidence(matched))
        if candidate >= 0:
            weight *= 1 - confidence(matched)
    if candidate >= 0:
        scratch.candidates[candidate, column] = place
        scratch.candidates[candidate, column + 1] = matched + 1
    return weight


@inlined_uncounted
def offer_external(
    trie: Trie,
    corpora: SortedCorpora,
    scratch: Scratch,
    options: Int64,
    first: int,
    window: int,
    count: int,
    weight: float,
) -> None:
    """Offer at the root the continuations of the ``count`` scanned places of the corpora."""
    by_frequency = options[BY_FREQUENCY] != 0
    left = weight
    kept = rank_continuations(corpora, scratch.scanned, count, by_frequency, scratch.tallies)
    total = 0
    for i in range(kept):
        total += scratch.tallies[i]
    for i in range(min(kept, breadth_at(options, 0))):
        place = scratch.scanned[i] + 1
        part = left / 2 if i + 1 < kept else left
        left -= part
        if by_frequency:
            part = weight * scratch.tallies[i] / total
        token = corpora.tokens[place]
        if find_offered(scratch, first, token) >= 0:
            continue
        child, child_window = child_context(trie, scratch, 0, 0, 0, token)
        candidate = offer(scratch, 0, token, child, child_window, part)
        if candidate >= 0:
            scratch.candidates[candidate, EXTERNAL] = place
            scratch.candidates[candidate, EXTERNAL_WINDOW] = window + 1


@inlined_uncounted
def expand(trie: Trie, corpora: SortedCorpora, scratch: Scratch, options: Int64, at: int, texts: RowTexts) -> None:
    """Offer the children of tree node ``at``."""
    weight, first, parent = scratch.grown_weights[at], scratch.sizes[CANDIDATES], scratch.grown[at]
    node, window = int(parent[NODE]), int(parent[WINDOW])
    if window == len(scratch.contexts):
        node, window = suffix_of(trie, node, window), window - 1
    context = (at, node, window)
    place = parent[PREDICTED] + 1
    if parent[PREDICTED_WINDOW] > 0 and place < len(texts.predicted):
        weight = offer_text(trie, scratch, first, context, PREDICTED, place, texts.predicted[place], weight)
    if parent[OWN] >= 0:
        place = parent[OWN] + 1
        if place == len(texts.own):
            # Past its end the text is assumed to repeat itself.
            place -= texts.period
        weight = offer_text(trie, scratch, first, context, OWN, place, texts.own[place], weight)
    if at == 0:
        for w in range(len(scratch.contexts) - 1, options[MIN_WINDOW] - 1, -1):
            node = int(scratch.contexts[w])
            if node != 0 and trie.nodes[node, CHILD] != 0 and weight >= MIN_WEIGHT:
                offer_context(trie, scratch, options, first, at, node, w, weight * confidence(w))
                weight *= 1 - confidence(w)
        if len(corpora.order) > 0 and weight >= MIN_WEIGHT:
            count, w = find_external(corpora, texts.own, options, scratch.scanned)
            offer_external(trie, corpora, scratch, options, first, w, count, weight * confidence(w))
        return
    if node != 0:
        offer_context(trie, scratch, options, first, at, node, window, weight * confidence(window))
    if parent[EXTERNAL] >= 0:
        place = parent[EXTERNAL] + 1
        offer_text(trie, scratch, first, context, EXTERNAL, place, corpora.tokens[place], weight)


@inlined_uncounted
def start_tree(trie: Trie, sequences: Sequences, scratch: Scratch, options: Int64, batch_slot: int) -> RowTexts:
    """Fill the contexts and the root of a batch slot's tree."""
    for w in range(1, len(scratch.contexts)):
        stamp = sequences.stamps[batch_slot, w]
        node = trie.paths[stamp % len(trie.paths)] if stamp >= trie.counters[OLDEST_STAMP] else 0
        # A path that runs in the text ends at its last token.
        scratch.contexts[w] = node if trie.nodes[node, CHILD] >= 0 else 0
    root, state = scratch.grown[0], sequences.state[batch_slot]
    root[NODE], root[WINDOW] = 0, 0
    root[PREDICTED], root[PREDICTED_WINDOW] = align_prediction(sequences, batch_slot)
    root[OWN], root[OWN_WINDOW] = find_own(sequences, batch_slot, options, scratch.scanned)
    root[EXTERNAL], root[EXTERNAL_WINDOW] = -1, 0
    root[NUM_CHILDREN], root[LEVEL] = 0, 0
    scratch.grown_weights[0] = 1.0
    scratch.sizes[CANDIDATES], scratch.sizes[QUEUED] = 0, 0
    length = state[OWN_LENGTH]
    return RowTexts(
        sequences.predictions[batch_slot, : state[PREDICTED_LENGTH]],
        sequences.tokens[batch_slot, :length],
        length - 1 - root[OWN],
    )


@inlined_uncounted
def add_heaviest(scratch: Scratch, options: Int64, max_branch: int, size: int, tree: Tree) -> bool:
    """Add the heaviest candidate whose parent has room as node ``size``.

    Return whether there was one.
    """
    grown = scratch.grown
    while scratch.sizes[QUEUED] > 0:
        candidate = pop_heap(scratch.heap, scratch.sizes[QUEUED], scratch.weights)
        scratch.sizes[QUEUED] -= 1
        entry = scratch.candidates[candidate]
        parent = entry[PARENT_INDEX]
        if grown[parent, NUM_CHILDREN] < min(breadth_at(options, grown[parent, LEVEL]), max_branch):
            grown[parent, NUM_CHILDREN] += 1
            tree.tokens[size], tree.parents[size] = entry[CANDIDATE_TOKEN], parent
            for column in range(NUM_CHILDREN):
                grown[size, column] = entry[column]
            grown[size, NUM_CHILDREN], grown[size, LEVEL] = 0, grown[parent, LEVEL] + 1
            scratch.grown_weights[size] = scratch.weights[candidate]
            tree.scores[size] = math.log(scratch.weights[candidate])
            return True
    return False


@inlined_uncounted
def grow_tree(
    trie: Trie,
    corpora: SortedCorpora,
    sequences: Sequences,
    scratch: Scratch,
    options: Int64,
    columns: Int64,
    tree: Tree,
) -> int:
    """Write the nodes below the root of a batch slot's tree, as many as fit.

    Return its number of nodes.
    """
    texts = start_tree(trie, sequences, scratch, options, columns[BATCH_SLOT_OF])
    size, more = 1, True
    while more and size < len(tree.tokens):
        if scratch.grown[size - 1, LEVEL] < columns[MAX_DEPTH_OF]:
            expand(trie, corpora, scratch, options, size - 1, texts)
        more = add_heaviest(scratch, options, columns[MAX_BRANCH_OF], size, tree)
        size += more
    return size


@compiled_uncounted
def draft_rows(
    trie: Trie,
    corpora: SortedCorpora,
    sequences: Sequences,
    scratch: Scratch,
    options: Int64,
    sent: SentRows,
    drafted: Drafted,
) -> int:
    """Learn the new tokens of all rows, then write a tree for each.

    Return how many got more than a root.

    A row whose batch slot or offsets are out of range is neither learned nor drafted for.
    """
    num_drafted = 0
    for row in range(len(sent.columns)):
        columns = sent.columns[row]
        low, high = sent.starts[row], sent.starts[row + 1]
        first, end = sent.prediction_starts[row], sent.prediction_starts[row + 1]
        sound = 0 <= low <= high <= len(sent.new_tokens) and 0 <= first <= end <= len(sent.prediction)
        if not sound or not 0 <= columns[BATCH_SLOT_OF] < len(sequences.state):
            columns[BATCH_SLOT_OF] = -1
        else:
            new_tokens, prediction = sent.new_tokens[low:high], sent.prediction[first:end]
            learn_row(trie, sequences, options, columns, new_tokens, prediction, scratch.scanned)
    drafted.node_starts[0] = 0
    for row in range(len(sent.columns)):
        columns = sent.columns[row]
        low, batch_slot = drafted.node_starts[row], columns[BATCH_SLOT_OF]
        high = low + min(max(columns[MAX_NODES_OF], 1), len(scratch.grown))
        drafted.tokens[low] = sequences.state[batch_slot, LAST] if batch_slot >= 0 else 0
        drafted.parents[low], drafted.scores[low] = -1, 0
        size = 1
        if batch_slot >= 0 and high > low + 1:
            tree = Tree(drafted.tokens[low:high], drafted.parents[low:high], drafted.scores[low:high])
            size = grow_tree(trie, corpora, sequences, scratch, options, columns, tree)
            num_drafted += size > 1
        drafted.node_starts[row + 1] = low + size
    return num_drafted
