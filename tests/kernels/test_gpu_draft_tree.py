"""Draft trees grown on the device, against the reference and against the CPU's compiled functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from foretoken_kernels import reference_draft_tree as reference
from foretoken_kernels.cpu import draft_tree as cpu
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as state

BLOCK = 16
SCALE = 0.8
NUM_SLOTS = 4096


@dataclass
class Wish:
    """What one request asks of its tree."""

    max_nodes: int = 8
    max_depth: int = 3
    max_branches: int = 2
    length: int = 9
    temperature: float = 0.0
    seed: int = 11
    choice: int = 0


class Head:
    """A draft model of a table: logits of a state, which is a function of the states and tokens before it.

    A node's state is its source's and its token, so a wrong source gives another tree.
    """

    def __init__(self, vocab: int, num_states: int = 97, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_states = num_states
        self.table = torch.randn((num_states, vocab), generator=generator) * 3.0

    def roots(self, count: int) -> torch.Tensor:
        return torch.arange(count) * 7 % self.num_states

    def step(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return (states * 31 + token_ids.long() * 17 + 5) % self.num_states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.table[states]


def set_requests(trees: state.DraftTrees, wishes: list[Wish]) -> None:
    rows = np.zeros((len(wishes), state.NUM_COLUMNS), np.int32)
    for tree, wish in enumerate(wishes):
        rows[tree, state.LENGTH] = wish.length
        rows[tree, state.MAX_NODES], rows[tree, state.MAX_DEPTH] = wish.max_nodes, wish.max_depth
        rows[tree, state.MAX_BRANCHES], rows[tree, state.CHOICE_INDEX] = wish.max_branches, wish.choice
        rows[tree, state.FIRST_SLOT] = -(-wish.length // BLOCK) * BLOCK
        rows[tree, state.ROOT_TOKEN] = 100 + tree
        seed = np.array([wish.seed], np.uint64).view(np.int32)
        rows[tree, state.SEED_LOW], rows[tree, state.SEED_HIGH] = seed
        rows.view(np.float32)[tree, state.TEMPERATURE] = wish.temperature
        rows.view(np.float32)[tree, state.TOP_P] = 1.0
    trees.requests.copy_(torch.from_numpy(rows))


def block_tables(num_trees: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(num_trees * 8, generator=generator).reshape(num_trees, 8).int()


@dataclass
class Course:
    """A whole draft: the wishes, the shapes, and the head."""

    wishes: list[Wish]
    branches: int
    depth: int
    head: Head
    nodes: int = 64
    target_ids: torch.Tensor | None = None
    vocab_limit: int = 0
    scale: float = SCALE
    dtype: torch.dtype = torch.float32

    def logits(self, states: torch.Tensor, trees: list[int], level: int, is_clipped: bool) -> torch.Tensor:
        """The head's, of beams of ``level``.

        With the sampler's noise the CPU leaves what has less than e**-MARGIN of the best one's chance out of a sum.
        Where it is compared with, such logits are -inf, so that nobody counts them.
        """
        logits = self.head.logits(states).to(self.dtype)
        if not is_clipped or self.scale == 0.0:
            return logits
        tokens = torch.arange(logits.shape[1]) if self.target_ids is None else self.target_ids.long()
        for row, tree in zip(logits, trees, strict=True):
            wish = self.wishes[tree]
            if wish.temperature > 0.0:
                words = (wish.seed & 0xFFFFFFFF, wish.seed >> 32)
                values = row.float() / wish.temperature
                values += reference.token_noise(tokens, wish.length + level, wish.choice, words)
                values[self.limit :] = -math.inf
                row[values < values.max() - (cpu.MARGIN - 0.01) * self.scale / wish.temperature] = -math.inf
        return logits

    @property
    def limit(self) -> int:
        return self.vocab_limit or self.head.table.shape[1]

    def run(
        self, functions: Any, device: str, is_clipped: bool = False
    ) -> tuple[state.DraftOutput, list[state.DraftBeams], state.DraftTrees]:
        """The draft by the functions of ``gpu`` or of ``reference``, and the beams of each level."""
        count, vocab = len(self.wishes), self.head.table.shape[1]
        trees = state.new_draft_trees(count, self.branches, self.depth, device)
        beams = state.new_draft_beams(count, self.branches, device)
        out = state.new_draft_output(count, self.nodes, device)
        # Garbage of an earlier draft must not matter.
        for tensor in trees[1:7]:
            tensor.fill_(3)
        set_requests(trees, self.wishes)
        tables = block_tables(count).to(device)
        target_ids = None if self.target_ids is None else self.target_ids.to(device)
        extra = ()
        if functions is gpu:
            extra = (gpu.offer_workspace(count, self.branches, vocab, device),)
        options = {"vocab_limit": self.limit, "target_ids": target_ids, "scale": self.scale}
        states = self.head.roots(count)
        logits = self.logits(states, list(range(count)), 0, is_clipped).to(device)
        functions.offer_children(trees, logits, 0, *extra, **options)
        rows = [row // self.branches for row in range(count * self.branches)]
        levels = []
        for level in range(1, self.depth):
            functions.choose_beams(trees, level, tables, BLOCK, beams, num_slots=NUM_SLOTS, scratch_slot=NUM_SLOTS - 1)
            levels.append(state.DraftBeams(*(tensor.clone().cpu() for tensor in beams)))
            states = self.head.step(states[beams.sources.cpu().long()], beams.token_ids.cpu())
            logits = self.logits(states, rows, level, is_clipped).to(device)
            functions.offer_children(trees, logits, level, *extra, **options)
        functions.emit_trees(trees, out)
        return state.DraftOutput(*(tensor.cpu() for tensor in out)), levels, trees

    def run_cpu(self) -> list[tuple[list[int], list[int], list[float]]]:
        """The draft by the CPU's compiled functions."""
        count, vocab = len(self.wishes), self.head.table.shape[1]
        trees = cpu.new_trees(count, max(self.nodes, self.branches + 1), vocab)
        for tree, wish in enumerate(self.wishes):
            branches = min(wish.max_branches, self.branches)
            trees.shapes[tree] = (wish.length, wish.max_nodes, wish.max_depth, branches, wish.choice, 0)
            trees.filters[tree] = (wish.temperature, 1.0, 0.0)
            trees.seeds[tree] = wish.seed
            trees.counts[tree, cpu.FIRST_SLOT] = -(-wish.length // BLOCK) * BLOCK
        target_ids = np.empty(0, np.int32) if self.target_ids is None else self.target_ids.numpy()
        rows = np.array([i for i, w in enumerate(self.wishes) if min(w.max_nodes - 1, w.max_depth) > 0], np.int32)
        beams = cpu.new_beams(count * self.branches * 2)
        tables = block_tables(count).numpy()

        def offer(states: torch.Tensor, trees_of: Any, nodes: Any, level: int) -> None:
            logits = self.logits(states, trees_of.tolist(), level, True).float().reshape(-1).numpy()
            cpu.offer_children(trees, logits, vocab, self.limit, target_ids, trees_of, nodes, 0, self.scale)

        states = self.head.roots(count)[rows.astype(np.int64)]
        if len(rows):
            offer(states, rows, np.full(len(rows), -1, np.int32), 0)
        for level in range(1, self.depth):
            found = cpu.choose_beams(trees, rows, level, tables, BLOCK, beams)
            if not found:
                break
            sources, tokens = torch.from_numpy(beams.sources[:found].copy()), torch.from_numpy(beams.token_ids[:found])
            states = self.head.step(states[sources.long()], tokens)
            offer(states, beams.rows[:found].copy(), beams.nodes[:found].copy(), level)
        starts, most = np.zeros(count + 1, np.int32), sum(max(w.max_nodes, 1) for w in self.wishes)
        tokens, parents, scores = np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(most, np.float32)
        cpu.emit_trees(trees, np.arange(100, 100 + count, dtype=np.int32), starts, tokens, parents, scores)
        return [
            (tokens[low:high].tolist(), parents[low:high].tolist(), scores[low:high].tolist())
            for low, high in pairwise(starts)
        ]

    def check(self, device: str, *, against_cpu: bool = True) -> state.DraftOutput:
        got, beams, trees = self.run(gpu, device, against_cpu)
        expected, expected_beams, expected_trees = self.run(reference, "cpu", against_cpu)
        for name in ("tokens", "parents", "num_nodes"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(got.scores, expected.scores, rtol=1e-5, atol=1e-5)
        for level, expected_level in zip(beams, expected_beams, strict=True):
            for name, tensor in level._asdict().items():
                torch.testing.assert_close(tensor, getattr(expected_level, name), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(trees.fed_counts[:, 1:].cpu(), expected_trees.fed_counts[:, 1:])
        if against_cpu:
            for tree, (tokens, parents, scores) in enumerate(self.run_cpu()):
                size = int(got.num_nodes[tree])
                assert (got.tokens[tree, :size].tolist(), got.parents[tree, :size].tolist()) == (tokens, parents)
                np.testing.assert_allclose(got.scores[tree, :size].numpy(), scores, rtol=0, atol=1e-5)
        return got


RAGGED = [
    Wish(16, 4, 4),
    Wish(1, 0, 0),
    Wish(4, 2, 1, length=40),
    Wish(3, 9, 3),
    Wish(12, 4, 4, length=31),
    Wish(9, 1, 4),
    Wish(9, 4, 0),
]


def at_temperature(wishes: list[Wish], temperature: float) -> list[Wish]:
    return [replace(w, temperature=temperature, seed=2**63 + 5 * i, choice=i % 3) for i, w in enumerate(wishes)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [61, 1500])
def test_trees_of_many_shapes(device: str, vocab: int, temperature: float) -> None:
    Course(at_temperature(RAGGED, temperature), branches=4, depth=5, head=Head(vocab)).check(device)


def test_all_values_count(device: str) -> None:
    """Those too that the CPU leaves out."""
    wishes = at_temperature(RAGGED, 1.1)
    Course(wishes, branches=4, depth=4, head=Head(1500)).check(device, against_cpu=False)


@pytest.mark.parametrize("nodes", [32, 64])
def test_wide_trees(device: str, nodes: int) -> None:
    wishes = [Wish(nodes, 5, 8), Wish(nodes, 5, 8, temperature=1.0, seed=77, choice=3, length=10)]
    out = Course(wishes, branches=8, depth=5, head=Head(300)).check(device)
    assert out.num_nodes.tolist() == [nodes, nodes]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chains(device: str, temperature: float) -> None:
    wishes = at_temperature([Wish(9, 8, 1), Wish(3, 8, 1), Wish(6, 8, 5, length=17)], temperature)
    out = Course(wishes, branches=1, depth=8, head=Head(130), nodes=16).check(device)
    assert out.num_nodes.tolist() == [9, 3, 6]
    assert out.parents[0, :9].tolist() == list(range(-1, 8))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("scale", [0.0, SCALE])
def test_reduced_vocabulary(device: str, temperature: float, scale: float) -> None:
    """Draft ids are few, and the noise is that of the target's ids."""
    target_ids = torch.randperm(128256, generator=torch.Generator().manual_seed(5))[:1100].sort().values.int()
    wishes = at_temperature([Wish(12, 4, 4), Wish(7, 3, 2)], temperature)
    out = Course(wishes, branches=4, depth=4, head=Head(1100), target_ids=target_ids, scale=scale).check(device)
    drafted = out.tokens[:, 1:][out.parents[:, 1:] >= 0]
    assert set(drafted.tolist()) <= set(target_ids.tolist())


def test_ids_at_and_above_the_limit_are_never_drafted(device: str) -> None:
    head = Head(200)
    head.table[:, 150:] += 20.0
    for temperature in (0.0, 1.0):
        wishes = at_temperature([Wish(12, 4, 4)], temperature)
        out = Course(wishes, branches=4, depth=3, head=head, vocab_limit=150).check(device)
        assert out.tokens[0, 1:12].max() < 150


def test_bfloat16_logits(device: str) -> None:
    """Many are equal: of equal ones the lower id is ahead."""
    for temperature in (0.0, 0.7):
        wishes = at_temperature([Wish(20, 4, 4), Wish(9, 3, 3)], temperature)
        Course(wishes, branches=4, depth=4, head=Head(900), dtype=torch.bfloat16).check(device)


def test_equal_logits_and_equal_scores(device: str) -> None:
    """Of equal logits the lower ids, of equal scores the earlier candidates; zeros are equal whatever their sign."""
    head = Head(1300)
    head.table = (torch.arange(1300) % 3 == 0).float().repeat(97, 1)
    head.table[:, ::5] *= -0.0
    Course([Wish(12, 3, 4), Wish(30, 4, 4), Wish(5, 4, 2)], branches=4, depth=4, head=head).check(device)
    head.table = torch.where(torch.arange(1300) % 2 == 0, 0.0, -0.0).repeat(97, 1)
    out = Course([Wish(12, 3, 4)], branches=4, depth=4, head=head).check(device)
    assert out.tokens[0, 1:5].tolist() == [0, 1, 2, 3]


def test_rows_without_finite_logits_have_no_children(device: str) -> None:
    head = Head(1200)
    inf = math.inf
    # Roots' states are 0, 7, 14, 21, 28.
    head.table[7, 1111] = inf
    head.table[14] = -inf
    head.table[21] = math.nan
    head.table[28, ::2] = math.nan
    head.table[28, 1::4] = -inf
    head.table[28, 3] = 1e30
    head.table[60:80, 5] = inf
    head.table[80:90] = -inf
    for temperature in (0.0, 0.7):
        wishes = at_temperature([Wish(20, 4, 4)] * 5, temperature)
        out = Course(wishes, branches=4, depth=4, head=head).check(device)
        assert out.num_nodes[1:4].tolist() == [1, 1, 1]
        assert out.num_nodes[0] > 5


def test_trees_that_want_nothing(device: str) -> None:
    wishes = [Wish(1, 5, 5), Wish(0, 5, 5), Wish(8, 0, 5), Wish(8, 5, 0)]
    course = Course(wishes, branches=8, depth=3, head=Head(64))
    out = course.check(device)
    assert out.num_nodes.tolist() == [1, 1, 1, 1]
    assert out.tokens[:, 0].tolist() == [100, 101, 102, 103]
    assert (out.parents == -1).all() and (out.tokens[:, 1:] == 0).all()
    _, levels, _ = course.run(gpu, device)
    for beams in levels:
        assert (beams.slot_mapping == NUM_SLOTS - 1).all() and (beams.context_lens == 0).all()
        assert (beams.masks == 0).all()
        assert beams.row_starts.tolist() == [0, 8, 16, 24, 32]


def test_no_more_beams_than_a_mask_has_bits(device: str) -> None:
    """Eleven levels of eight: the last ones find the mask full."""
    head = Head(40)
    head.table *= 0.01
    course = Course([Wish(64, 11, 8), Wish(64, 11, 6)], branches=8, depth=11, head=head)
    course.head.table[:, 8:] -= 30.0
    course.head.table[:, 0] += 4.0
    _, _, trees = course.run(gpu, device)
    course.check(device)
    assert int(trees.fed_counts.max()) <= state.MAX_BEAM_NODES
