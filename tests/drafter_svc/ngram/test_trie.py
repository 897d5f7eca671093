"""The trie's arrays hold exactly the windows they must, at capacities that evict all the time."""

from __future__ import annotations

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
    extend_into_unused,
    extend_paths,
    find_and_touch,
    new_trie,
    start_path,
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
    lengths: dict[int, int] = field(default_factory=dict)
    texts: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    # Maps a path's stamp to (batch slot's text, place in it).
    paths: list[tuple[int, list[int], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        depth = self.window + 1
        self.trie = new_trie(self.capacity)
        self.trie.counters[NEXT_STAMP] = self.trie.counters[OLDEST_STAMP] = self.first_stamp
        self.sequences = new_sequences(NUM_BATCH_SLOTS, 4096, depth)
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

    def expected(self) -> set[Key]:
        """Return all beginnings of the paths that have not been popped, roots included."""
        alive = self.paths[int(self.trie.counters[OLDEST_STAMP]) - self.first_stamp :]
        return {
            (salt, tuple(text[start : start + size]))
            for salt, text, start in alive
            for size in range(min(self.window + 1, len(text) - start) + 1)
        }

    def nodes(self) -> dict[int, Key]:
        """Return the nodes of the trie, with the windows of their parents.

        Roots are found by the hash table, which has just the nodes with siblings beside them.
        """
        nodes = self.trie.nodes
        hashed = []
        for node in self.trie.buckets.tolist():
            while node != 0:
                hashed.append(node)
                node = int(nodes[node, CHAIN])
        roots = [node for node in hashed if nodes[node, TOKEN] == ROOT]
        found, wanted = [], set(roots)
        below = [(root, 0) for root in roots]
        while below:
            node, level = below.pop()
            found.append(node)
            child, children = int(nodes[node, CHILD]) if level <= self.window else 0, []
            while child != 0:
                children.append(child)
                child = int(nodes[child, NEXT])
            below += [(child, level + 1) for child in children]
            wanted |= set(children) if len(children) > 1 else set()
        assert len(found) == len(set(found)) and set(hashed) == wanted and len(hashed) == len(wanted)
        keys: dict[int, Key] = {}
        for node in found:
            window: list[int] = []
            at = node
            while nodes[at, TOKEN] != ROOT:
                window.insert(0, int(nodes[at, TOKEN]))
                at = int(nodes[at, PARENT])
            keys[node] = int(nodes[at, NEXT]) & 0xFFFFFFFF | int(nodes[at, PREVIOUS]) << 32, tuple(window)
        return keys

    def check(self) -> None:
        nodes, counters = self.trie.nodes, self.trie.counters
        keys = self.nodes()
        by_key = {key: node for node, key in keys.items()}
        assert set(by_key) == self.expected() and len(by_key) == len(keys)
        assert counters[NUM_NODES] == len(keys) <= self.capacity
        assert counters[NEXT_STAMP] - self.first_stamp == len(self.paths)
        assert counters[NEXT_STAMP] - counters[OLDEST_STAMP] <= self.capacity
        free, num_free = int(counters[FREE]), 0
        while free != 0:
            assert free not in keys
            free, num_free = int(nodes[free, CHAIN]), num_free + 1
        assert num_free + len(keys) == counters[NUM_CREATED]
        for node, (salt, window) in keys.items():
            if len(window) == self.window + 1:
                assert nodes[node, CHILD] == by_key[salt, window[1:]]
                continue
            children, before, child = set(), 0, int(nodes[node, CHILD])
            while child != 0:
                assert nodes[child, PREVIOUS] == before
                children.add(keys[child])
                before, child = child, int(nodes[child, NEXT])
            assert children == {key for key in by_key if key[0] == salt and key[1][:-1] == window and key[1]}


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
    harness = Harness(capacity=500, window=4)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 3000).tolist()
    for start in range(0, len(tokens), 3):
        harness.feed(0, 1, 9, tokens[start : start + 3])
        if start > 300:
            # The oldest path holds at most its own five nodes.
            assert harness.trie.counters[NUM_NODES] > 500 - 5
    harness.check()
    assert harness.trie.counters[NUM_EVICTIONS] > 10_000


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


@settings(max_examples=60)
@given(st.data())
def test_paths_are_extended_alike_into_unused_nodes(data: st.DataObject) -> None:
    """The short way and the one that may evict leave the same arrays behind."""
    window = data.draw(st.integers(1, 4))
    depth = window + 1
    tries = [new_trie(400), new_trie(400)]
    ends = [np.zeros((2, depth + 1), np.int32) for _ in tries]
    stamps = [np.zeros((2, depth + 1), np.int64) for _ in tries]
    found = np.zeros(depth, np.int32)
    for text, token in data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=60)):
        for trie, end, stamp, extend in zip(tries, ends, stamps, (extend_paths, extend_into_unused), strict=True):
            start_path(trie, end[text], stamp[text], 5)
            find_and_touch(trie, end[text], stamp[text], found, token)
            extend(trie, end[text], stamp[text], found, token)
    for first, second in zip((*tries[0], ends[0], stamps[0]), (*tries[1], ends[1], stamps[1]), strict=True):
        np.testing.assert_array_equal(first, second)
