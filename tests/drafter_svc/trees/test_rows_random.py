"""Random courses of sequences over shared and reused blocks: drafts fit their valid range."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafter_svc.trees.host_growth import HostGrowth
from drafter_svc.trees.passes import DraftPasses
from drafter_svc.trees.rows import DraftRows
from tests.support.paged_draft import BLOCK, DigestModel, Row, reference_tree, request_of, some_tokens, target_info

NUM_BLOCKS, NUM_BATCH_SLOTS, MOST_TOKENS = 20, 3, 30
# Prompts that begin alike.
TEXTS = [some_tokens(40, 1), some_tokens(40, 2)]
TEXTS.append([*TEXTS[0][:10], *TEXTS[1][:30]])


@dataclass
class Running:
    """A sequence of the verifier: tokens sent so far, with
    hidden states from ``first_hidden`` on.
    """

    tokens: list[int]
    blocks: list[int]
    salt: int
    batch_slot: int
    generation: int
    first_hidden: int
    sent: int = 0


@dataclass
class Verifier:
    """A block allocator with a prefix cache, whose requests may be lost."""

    hidden: bool
    random: random.Random
    cached: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    final_updates: list[Row] = field(default_factory=list)
    num_generations: int = 0

    def free_block(self) -> int | None:
        """Return a block that no running sequence has, cached or not."""
        held = {block for sequence in self.running.values() for block in sequence.blocks}
        free = [block for block in range(NUM_BLOCKS) if block not in held]
        if not free:
            return None
        block = self.random.choice(free)
        self.cached = {key: cached for key, cached in self.cached.items() if cached != block}
        return block

    def start(self, text: int, length: int, salt: int) -> None:
        """Start a sequence, if a batch slot is free: a request has at most two rows for each."""
        ended = [row.batch_slot for row in self.final_updates]
        free = [slot for slot in range(NUM_BATCH_SLOTS) if slot not in self.running and ended.count(slot) < 2]
        if not free:
            return
        batch_slot = self.random.choice(free)
        tokens, blocks = TEXTS[text][:length], []
        while (len(blocks) + 1) * BLOCK < length:
            key = salt, tuple(tokens[: (len(blocks) + 1) * BLOCK])
            if key not in self.cached:
                break
            blocks.append(self.cached[key])
        self.num_generations += 1
        sequence = Running(tokens, blocks, salt, batch_slot, self.num_generations, max(len(blocks) * BLOCK, 1))
        self.running[batch_slot] = sequence
        self.reserve(sequence)

    def reserve(self, sequence: Running) -> None:
        while len(sequence.blocks) * BLOCK < len(sequence.tokens):
            block = self.free_block()
            if block is None:
                del self.running[sequence.batch_slot]
                return
            sequence.blocks.append(block)

    def commit(self, batch_slot: int, count: int) -> None:
        sequence = self.running[batch_slot]
        sequence.tokens = [*sequence.tokens, *(self.random.randrange(3) for _ in range(count))]
        if len(sequence.tokens) > MOST_TOKENS:
            self.finish(batch_slot)
        else:
            self.reserve(sequence)

    def finish(self, batch_slot: int) -> None:
        sequence = self.running.pop(batch_slot)
        held = len(sequence.blocks) * BLOCK
        sequence.tokens = sequence.tokens[:held]
        self.final_updates.append(self.row(sequence, max_nodes=1))
        for count in range(1, len(sequence.tokens) // BLOCK + 1):
            self.cached.setdefault((sequence.salt, tuple(sequence.tokens[: count * BLOCK])), sequence.blocks[count - 1])

    def row(self, sequence: Running, max_nodes: int) -> Row:
        length = len(sequence.tokens)
        new = length - sequence.sent
        row = Row(
            list(sequence.tokens),
            new,
            list(sequence.blocks),
            batch_slot=sequence.batch_slot,
            generation=sequence.generation,
            salt=sequence.salt,
            hidden=min(new, length - sequence.first_hidden),
            max_nodes=max_nodes,
            max_depth=3,
            max_branches=2,
        )
        sequence.sent = length
        return row

    def request(self) -> list[Row]:
        rows = [self.row(sequence, self.random.choice((1, 6, 6))) for sequence in self.running.values()]
        final_updates, self.final_updates = self.final_updates, []
        return final_updates + [row for row in rows if row.new]


ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 2), st.integers(1, 24), st.integers(0, 1)),
    st.tuples(st.just("commit"), st.integers(0, 2), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 2), st.just(0), st.just(0)),
    st.tuples(st.just("post"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("lose"), st.just(0), st.just(0), st.just(0)),
)


@pytest.mark.parametrize(
    ("num_depths", "hidden", "loses"),
    [(1, True, True), (1, True, False), (1, False, True), (2, True, False)],
    ids=["head", "head, nothing lost", "draft model", "two modules, nothing lost"],
)
@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), seed=st.integers(0, 2**16))
@example(
    actions=[
        ("start", 0, 1, 0),
        ("post", 0, 0, 0),
        ("start", 0, 1, 0),
        ("commit", 0, 1, 0),
        ("commit", 0, 3, 0),
        ("start", 0, 4, 1),
        ("finish", 1, 0, 0),
        ("start", 0, 4, 1),
    ],
    seed=7491,
)
def test_trees_are_right(
    num_depths: int, hidden: bool, loses: bool, actions: list[tuple[str, int, int, int]], seed: int
) -> None:
    info = target_info(num_blocks=NUM_BLOCKS, max_batch_slots=NUM_BATCH_SLOTS)
    model = DigestModel(num_depths, reads_hidden=hidden)
    rows = DraftRows(info, first_position=int(hidden), num_depths=num_depths, needs_hidden=hidden)
    passes = DraftPasses(model, info, rows, make_growth=partial(HostGrowth, model, info))
    verifier = Verifier(hidden, random.Random(seed))
    for name, *values in [*actions, ("post", 0, 0, 0)]:
        if name == "start":
            verifier.start(*values)
        elif name == "commit" and values[0] in verifier.running:
            verifier.commit(values[0], values[1])
        elif name == "finish" and values[0] in verifier.running:
            verifier.finish(values[0])
        elif name == "lose" and loses:
            verifier.request()
        elif name == "post" and (sent := verifier.request()):
            model.starts = {}
            batch = passes.draft(request_of(sent, with_hidden=hidden))
            for index, row in enumerate(sent):
                tree = batch.tree(index)
                assert tree.tokens[0] == row.tokens[-1] or (row.new == 0 and tree.tokens.tolist() == [0])
                drafted = index in model.starts and row.max_nodes > 1
                if not loses:
                    assert drafted == (row.max_nodes > 1 and len(row.tokens) > int(hidden))
                    assert model.starts.get(index, int(hidden)) == int(hidden)
                if drafted:
                    expected = reference_tree(row, model.starts[index], num_depths=num_depths, with_hidden=hidden)
                    assert (tree.tokens.tolist(), tree.parents.tolist()) == expected[:2]
