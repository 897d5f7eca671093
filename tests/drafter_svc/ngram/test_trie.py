"""The trie's arrays hold exactly the windows they must, at capacities that evict all the time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.ngram.candidates import new_scratch
from drafter_svc.ngram.corpora import CorpusStore
from drafter_svc.ngram.sequences import new_sequences
from drafter_svc.ngram.tree import Drafted, SentRows, draft_rows
from drafter_svc.ngram.trie import (
    CHAIN,
    CHILD,
    CHUNK,
    FREE,
    NEXT,
    NEXT_STAMP,
    NUM_CREATED,
    NUM_EVICTIONS,
    NUM_NODES,
    OLDEST_STAMP,
    PARENT,
    PREVIOUS,
    ROOT,
    TOKEN,
    first_child,
    new_trie,
    next_sibling,
    suffix_of,
    token_of,
)

NUM_BATCH_SLOTS = 3
VOCAB_SIZE = 50
# A salt and a window of its text.
Key = tuple[int, tuple[int, ...]]


@dataclass
class Harness:
    """A trie of any capacity, fed through the compiled batch, and the text of each started path."""

    capacity: int
    window: int
    first_stamp: int = 0
    num_batch_slots: int = NUM_BATCH_SLOTS
    lengths: dict[int, int] = field(default_factory=dict)
    texts: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    # Maps a path's stamp to (batch slot's text, place in it).
    paths: list[tuple[int, list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        depth = self.window + 1
        self.trie = new_trie(self.capacity)
        self.trie.counters[NEXT_STAMP] = self.trie.counters[OLDEST_STAMP] = self.first_stamp
        self.sequences = new_sequences(self.num_batch_slots, 4096, depth)
        self.scratch = new_scratch(16, 4, depth)
        self.options = np.array([VOCAB_SIZE, 1, self.window, 1, 4, 0], np.int64)

    def feed(self, batch_slot: int, generation: int, salt: int, tokens: list[int]) -> list[int]:
        """Return the tokens of the tree drafted after ``tokens``."""
        if self.texts.get(batch_slot, (0, []))[0] != generation:
            self.texts[batch_slot], self.lengths[batch_slot] = (generation, []), 0
        text = self.texts[batch_slot][1]
        for token in tokens:
            self.paths.append((salt, text, len(text)))
            text.append(token)
        self.lengths[batch_slot] += len(tokens)
        length = self.lengths[batch_slot]
        none = np.zeros(2, np.int32), np.zeros(0, np.int32)
        columns = np.array([[batch_slot, generation, length, 16, salt, length, 99, 99]], np.int64)
        drafted = Drafted(
            np.zeros(2, np.int32), np.zeros(16, np.int32), np.zeros(16, np.int32), np.zeros(16, np.float32)
        )
        draft_rows(
            self.trie,
            CorpusStore(1, self.window).index,
            self.sequences,
            self.scratch,
            self.options,
            SentRows(columns, np.array([0, len(tokens)], np.int32), np.array(tokens, np.int32), *none),
            drafted,
        )
        return [int(token) for token in drafted.tokens[: drafted.node_starts[1]]]

    def expected(self) -> Counter[Key]:
        """Count all beginnings of the paths that have not been popped, roots included."""
        alive = self.paths[int(self.trie.counters[OLDEST_STAMP]) - self.first_stamp :]
        return Counter(
            (salt, tuple(text[start : start + size]))
            for salt, text, start in alive
            for size in range(min(self.window + 1, len(text) - start) + 1)
        )

    def children(self, node: int) -> list[int]:
        """Return the children of a node, latest first."""
        children, before, child = [], 0, int(first_child(self.trie, node))
        while child != 0:
            assert child < 0 or self.trie.nodes[child, PREVIOUS] == before
            children.append(child)
            before, child = child, int(next_sibling(self.trie, child))
        return children

    def found(self) -> dict[Key, int]:
        """Return the nodes of the trie by their windows. Some are in the text.

        Roots are found by the hash table, which has just the nodes with siblings beside them.
        """
        nodes = self.trie.nodes
        hashed = []
        for node in self.trie.buckets.tolist():
            while node != 0:
                hashed.append(node)
                node = int(nodes[node, CHAIN])
        roots = [node for node in hashed if nodes[node, TOKEN] == ROOT]
        wanted = set(roots)
        below: list[tuple[Key, int]] = [
            ((int(nodes[root, NEXT]) & 0xFFFFFFFF | int(nodes[root, PREVIOUS]) << 32, ()), root) for root in roots
        ]
        found: dict[Key, int] = {}
        while below:
            (salt, window), node = below.pop()
            assert (salt, window) not in found
            found[salt, window] = node
            children = self.children(node) if len(window) <= self.window else []
            below += [((salt, (*window, int(token_of(self.trie, child)))), child) for child in children]
            wanted |= set(children) if len(children) > 1 else set()
        assert set(hashed) == wanted and len(hashed) == len(wanted)
        return found

    def check(self) -> None:
        nodes, counters = self.trie.nodes, self.trie.counters
        found, expected = self.found(), self.expected()
        assert set(found) == set(expected)
        entries = [node for node in found.values() if node > 0]
        assert len(entries) == len(set(entries)) == counters[NUM_NODES] <= self.capacity
        assert counters[NEXT_STAMP] - self.first_stamp == len(self.paths)
        assert counters[NEXT_STAMP] - counters[OLDEST_STAMP] <= self.capacity
        free, num_free = int(counters[FREE]), 0
        while free != 0:
            assert free not in entries
            free, num_free = int(nodes[free, CHAIN]), num_free + 1
        assert num_free + len(entries) == counters[NUM_CREATED]
        for (salt, window), node in found.items():
            if node > 0:
                assert nodes[node, PARENT] == (found[salt, window[:-1]] if window else 0)
                assert nodes[node, CHILD] >= 0 or expected[salt, window] == 1
            if len(window) == self.window + 1:
                assert suffix_of(self.trie, node, len(window)) == found[salt, window[1:]]


@given(
    capacity=st.integers(1, 120),
    window=st.integers(1, 5),
    first_stamp=st.sampled_from([0, 2**31 - 30, 2**32 - 30]),
    steps=st.lists(
        st.tuples(st.integers(0, NUM_BATCH_SLOTS - 1), st.booleans(), st.lists(st.integers(0, 5), max_size=10)),
        max_size=30,
    ),
)
@settings(max_examples=200)
def test_the_trie_holds_the_latest_paths_and_nothing_else(
    capacity: int, window: int, first_stamp: int, steps: list[tuple[int, bool, list[int]]]
) -> None:
    harness = Harness(capacity, window, first_stamp)
    generations = dict.fromkeys(range(NUM_BATCH_SLOTS), 1)
    for batch_slot, new_sequence, tokens in steps:
        generations[batch_slot] += new_sequence
        salt = [3, 3, 3 + (1 << 32)][(batch_slot + generations[batch_slot]) % 3]
        harness.feed(batch_slot, generations[batch_slot], salt, tokens)
        harness.check()


def test_eviction_frees_no_more_than_it_must() -> None:
    harness = Harness(capacity=200, window=4)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 3000).tolist()
    for start in range(0, len(tokens), 3):
        harness.feed(0, 1, 9, tokens[start : start + 3])
        if start > 300:
            # The oldest path holds at most its own five nodes.
            assert harness.trie.counters[NUM_NODES] > 200 - 5
    harness.check()
    assert harness.trie.counters[NUM_EVICTIONS] > 2_000


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_texts_go_on_from_chunk_to_chunk(data: st.DataObject) -> None:
    """Texts longer than CHUNK that grow side by side, end in the middle of a chunk and at its end."""
    window = data.draw(st.integers(1, 5))
    harness = Harness(20_000, window)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    generations = [1, 1]
    known: list[int] = []
    for _ in range(60):
        batch_slot = int(random.integers(2))
        if random.random() < 0.1:
            generations[batch_slot] += 1
        # Most text is new; some comes again.
        size = int(random.choice([1, 7, CHUNK - 8, CHUNK]))
        tokens = random.integers(0, VOCAB_SIZE, size).tolist()
        if known and random.random() < 0.3:
            start = int(random.integers(len(known)))
            tokens = known[start : start + size]
        known += tokens
        harness.feed(batch_slot, generations[batch_slot], 9, tokens)
    harness.check()
    assert harness.trie.counters[NUM_EVICTIONS] == 0


def test_chunks_are_taken_again() -> None:
    harness = Harness(capacity=3000, window=3)
    random = np.random.default_rng(0)
    for step in range(1600):
        # A text that goes on so rarely that its chunk goes to another one meanwhile.
        batch_slot = 2 if step % 400 == 0 else step % 2
        harness.feed(batch_slot, 1, 9, random.integers(0, 3, 50).tolist())
        if step % 50 == 0:
            harness.check()
    assert 3 * len(harness.trie.text) < 1600 * 50 and harness.trie.counters[NUM_NODES] < 500


def test_more_batch_slots_than_chunks() -> None:
    harness = Harness(capacity=500, window=3, num_batch_slots=100)
    random = np.random.default_rng(0)
    assert len(harness.trie.chunks) < 100
    for step in range(1000):
        harness.feed(step * 7 % 100, 1, 9, random.integers(0, 3, 2).tolist())
        if step % 10 == 0:
            harness.check()


def test_text_that_is_always_the_same_does_not_overflow_the_paths() -> None:
    harness = Harness(capacity=50, window=3)
    for _ in range(100):
        harness.feed(0, 1, 9, [7, 8, 7])
    harness.check()
    assert harness.trie.counters[NUM_EVICTIONS] == 0
    assert harness.feed(1, 1, 9, [8, 7])[1:3] == [7, 8]


@pytest.mark.parametrize("capacity", [1, 2, 3, 7])
def test_a_trie_smaller_than_one_path(capacity: int) -> None:
    harness = Harness(capacity, window=8)
    for step in range(50):
        assert harness.feed(step % 2, 1 + step // 10, 9, [1, 2, 3, 4, step % VOCAB_SIZE])[0] == step % VOCAB_SIZE
        harness.check()


def test_many_salts_do_not_outlive_their_paths() -> None:
    harness = Harness(capacity=200, window=3)
    for salt in range(1000):
        harness.feed(0, salt + 1, salt, [1, 2, 3, 4, 5])
    harness.check()
    assert harness.feed(1, 1, 999, [1, 2, 3])[1:] == [4, 5]
    assert harness.feed(2, 1, 0, [1, 2, 3]) == [3]


def test_nodes_that_went_to_another_salt_are_not_drafted_from() -> None:
    harness = Harness(capacity=60, window=3)
    random = np.random.default_rng(0)
    for generation in range(1, 30):
        assert harness.feed(0, generation, 1, [1, 2, 3, 4]) == [4]
        # Every node of batch slot 0's paths is freed and taken for others, with children.
        for other in range(8):
            harness.feed(1, 8 * generation + other, 2, random.integers(10, VOCAB_SIZE, 10).tolist())
        assert harness.feed(0, generation, 1, []) == [4]
        assert harness.feed(0, generation, 1, [5]) == [5]
        harness.check()
