"""Run whole drafts with a table as draft model: on the device, by the reference, on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from foretoken_kernels import reference_draft_tree as reference
from foretoken_kernels.cpu import draft_tree as cpu
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as state

BLOCK = 16
SCALE = 0.8
NUM_KV_SLOTS = 4096
SCRATCH = NUM_KV_SLOTS - 1


@dataclass
class TreeRequest:
    """One request's settings for its tree."""

    max_nodes: int = 8
    max_depth: int = 3
    max_branches: int = 2
    length: int = 9
    temperature: float = 0.0
    seed: int = 11
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Head:
    """A draft model of a table: logits of a hidden state, computed from earlier states and tokens.

    A node's state depends on its source and its token, so a wrong source gives another tree.
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


def set_requests(trees: state.DraftTrees, tree_requests: list[TreeRequest]) -> None:
    rows = np.zeros((len(tree_requests), state.NUM_COLUMNS), np.int32)
    for tree, request in enumerate(tree_requests):
        rows[tree, state.LENGTH] = request.length
        rows[tree, state.MAX_NODES], rows[tree, state.MAX_DEPTH] = request.max_nodes, request.max_depth
        rows[tree, state.MAX_BRANCHES], rows[tree, state.CHOICE_INDEX] = request.max_branches, request.choice
        rows[tree, state.FIRST_KV_SLOT] = -(-request.length // BLOCK) * BLOCK
        rows[tree, state.ROOT_TOKEN] = 100 + tree
        seed = np.array([request.seed], np.uint64).view(np.int32)
        rows[tree, state.SEED_LOW], rows[tree, state.SEED_HIGH] = seed
        rows.view(np.float32)[tree, state.TEMPERATURE] = request.temperature
        rows[tree, state.TOP_K] = request.top_k
        rows.view(np.float32)[tree, state.TOP_P] = request.top_p
        rows.view(np.float32)[tree, state.MIN_P] = request.min_p
    trees.requests.copy_(torch.from_numpy(rows))


def block_tables(num_trees: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(num_trees * 8, generator=generator).reshape(num_trees, 8).int()


@dataclass
class Course:
    """A whole draft: requests, shapes, and the head."""

    tree_requests: list[TreeRequest]
    branches: int
    depth: int
    head: Head
    nodes: int = 64
    target_ids: torch.Tensor | None = None
    vocab_limit: int = 0
    scale: float = SCALE
    dtype: torch.dtype = torch.float32
    filtered: bool = True
    modules: int = 1
    # Room for more trees than the requests need.
    spare: int = 2

    def logits(self, states: torch.Tensor, trees: list[int], level: int, is_clipped: bool) -> torch.Tensor:
        """Return the head's logits for the beams of ``level``.

        With the sampler's noise, the CPU leaves tokens with less than e**-MARGIN of the best one's
        chance out of a sum. With ``is_clipped``, such logits are -inf, so that no implementation
        counts them.
        """
        logits = self.head.logits(states).to(self.dtype)
        if not is_clipped or self.scale == 0.0:
            return logits
        tokens = torch.arange(logits.shape[1]) if self.target_ids is None else self.target_ids.long()
        for row, tree in zip(logits, trees, strict=True):
            request = self.tree_requests[tree]
            if request.temperature > 0.0:
                words = (request.seed & 0xFFFFFFFF, request.seed >> 32)
                values = row.float() / request.temperature
                values += reference.token_noise(tokens, request.length + level, request.choice, words)
                values = values.nan_to_num(-math.inf, math.inf, -math.inf)
                values[self.limit :] = -math.inf
                row[values < values.max() - (cpu.MARGIN - 0.01) * self.scale / request.temperature] = -math.inf
        return logits

    @property
    def limit(self) -> int:
        return self.vocab_limit or self.head.table.shape[1]

    def run(
        self, functions: Any, device: str, is_clipped: bool = False
    ) -> tuple[state.DraftOutput, list[state.DraftBeams], state.DraftTrees]:
        """Run the draft with functions of ``gpu`` or ``reference``; return each level's beams."""
        count, vocab = len(self.tree_requests), self.head.table.shape[1]
        trees = state.new_draft_trees(count + self.spare, self.branches, self.depth, device).first(count)
        beams = state.new_draft_beams(count + self.spare, self.branches, device).first(count)
        out = new_draft_output(count, self.nodes, device)
        # State left by an earlier draft must not matter.
        for tensor in trees[1:7]:
            tensor.fill_(3)
        set_requests(trees, self.tree_requests)
        tables = block_tables(count).to(device)
        target_ids = None if self.target_ids is None else self.target_ids.to(device)
        extra = ()
        if functions is gpu:
            extra = (gpu.offer_workspace(count, self.branches, vocab, device),)
        options = {"vocab_limit": self.limit, "target_ids": target_ids, "scale": self.scale, "filtered": self.filtered}
        states = self.head.roots(count)
        logits = self.logits(states, list(range(count)), 0, is_clipped).to(device)
        functions.offer_children(trees, logits, 0, *extra, **options)
        rows = [row // self.branches for row in range(count * self.branches)]
        levels = []
        for level in range(1, self.depth):
            first_depth = min(level, self.modules - 1)
            functions.choose_beams(
                trees,
                level,
                tables,
                BLOCK,
                beams,
                num_kv_slots=NUM_KV_SLOTS,
                scratch_kv_slot=SCRATCH,
                first_depth=first_depth,
            )
            levels.append(state.DraftBeams(*(tensor.clone().cpu() for tensor in beams)))
            states = self.head.step(states[beams.sources.cpu().long()], beams.token_ids.cpu())
            logits = self.logits(states, rows, level, is_clipped).to(device)
            functions.offer_children(trees, logits, level, *extra, **options)
        functions.emit_trees(trees, out)
        return state.DraftOutput(*(tensor.cpu() for tensor in out)), levels, trees

    def run_cpu(self) -> tuple[list[tuple[list[int], list[int], list[float]]], list[cpu.Beams]]:
        """Run the draft on the CPU; return trees (tokens, parents, scores) and beams."""
        count, vocab = len(self.tree_requests), self.head.table.shape[1]
        trees = cpu.new_trees(count, max(self.nodes, self.branches + 1), vocab)
        for tree, request in enumerate(self.tree_requests):
            branches = min(request.max_branches, self.branches)
            depth = min(request.max_depth, request.max_nodes - 1)
            trees.shapes[tree] = (request.length, request.max_nodes, depth, branches, request.choice, request.top_k)
            trees.filters[tree] = (request.temperature, request.top_p, request.min_p)
            trees.seeds[tree] = request.seed
            trees.counts[tree, cpu.FIRST_KV_SLOT] = -(-request.length // BLOCK) * BLOCK
        target_ids = np.empty(0, np.int32) if self.target_ids is None else self.target_ids.numpy()
        rows = np.array(
            [i for i, w in enumerate(self.tree_requests) if min(w.max_nodes - 1, w.max_depth) > 0], np.int32
        )
        beams = cpu.new_beams(count * self.branches * 2)
        tables = block_tables(count).numpy()

        def offer(states: torch.Tensor, trees_of: Any, nodes: Any, level: int) -> None:
            logits = self.logits(states, trees_of.tolist(), level, True).float().reshape(-1).numpy()
            cpu.offer_children(trees, logits, vocab, self.limit, target_ids, trees_of, nodes, 0, self.scale)

        levels = []
        states = self.head.roots(count)[rows.astype(np.int64)]
        if len(rows):
            offer(states, rows, np.full(len(rows), -1, np.int32), 0)
        for level in range(1, self.depth):
            found = cpu.choose_beams(trees, rows, level, tables, BLOCK, beams)
            cpu.keep_module_ancestors(trees, beams, found, min(level, self.modules - 1))
            levels.append(cpu.Beams(*(array[:found].copy() for array in beams)))
            if not found:
                break
            sources, tokens = torch.from_numpy(beams.sources[:found].copy()), torch.from_numpy(beams.token_ids[:found])
            states = self.head.step(states[sources.long()], tokens)
            offer(states, beams.rows[:found].copy(), beams.nodes[:found].copy(), level)
        starts, most = np.zeros(count + 1, np.int32), sum(max(w.max_nodes, 1) for w in self.tree_requests)
        tokens, parents, scores = np.zeros(most, np.int32), np.zeros(most, np.int32), np.zeros(most, np.float32)
        cpu.emit_trees(trees, np.arange(100, 100 + count, dtype=np.int32), starts, tokens, parents, scores)
        found_trees = [
            (tokens[low:high].tolist(), parents[low:high].tolist(), scores[low:high].tolist())
            for low, high in pairwise(starts)
        ]
        return found_trees, levels

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
            found_trees, levels = self.run_cpu()
            for level, of_cpu in zip(beams, levels, strict=False):
                run = level.context_lens > 0
                assert level.token_ids[run].tolist() == of_cpu.token_ids.tolist()
                assert level.positions[run].tolist() == of_cpu.positions.tolist()
                assert level.kv_slots[run].tolist() == of_cpu.kv_slots.tolist()
                assert level.context_lens[run].tolist() == of_cpu.context_lens.tolist()
                assert level.masks[run].tolist() == of_cpu.masks.astype(np.int64).tolist()
                assert (run.nonzero()[:, 0] // self.branches).tolist() == of_cpu.rows.tolist()
            for tree, (tokens, parents, scores) in enumerate(found_trees):
                size = int(got.num_nodes[tree])
                assert (got.tokens[tree, :size].tolist(), got.parents[tree, :size].tolist()) == (tokens, parents)
                np.testing.assert_allclose(got.scores[tree, :size].numpy(), scores, rtol=0, atol=1e-5)
        return got


def new_draft_output(max_trees: int, max_nodes: int, device: torch.device | str) -> state.DraftOutput:
    return state.DraftOutput(
        tokens=torch.zeros((max_trees, max_nodes), dtype=torch.int32, device=device),
        parents=torch.zeros((max_trees, max_nodes), dtype=torch.int32, device=device),
        scores=torch.zeros((max_trees, max_nodes), dtype=torch.float32, device=device),
        num_nodes=torch.zeros(max_trees, dtype=torch.int32, device=device),
    )
