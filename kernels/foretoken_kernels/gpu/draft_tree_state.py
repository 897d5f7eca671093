"""Device tensors of growing draft trees: requests, state between levels, input of a pass.

A tree's candidates have fixed places, so that a whole draft is one CUDA graph. With K =
``branches``, child j of the root is candidate j, and child j of beam k of level d >= 1 is candidate
``K + ((d - 1) * K + k) * K + j``. foretoken_kernels.cpu.draft_tree counts them in the same order. A
place without a candidate has score -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Beams that one tree can run through the draft model: the bits of one mask word.
MAX_BEAM_NODES = 64
# Columns of DraftTrees.requests, an int32 matrix that one copy a draft sets. TEMPERATURE, TOP_P and
# MIN_P hold the bits of a float32; SEED_LOW and SEED_HIGH hold the words of the seed. A tree with
# fewer than two nodes, one level or one branch is inert. Each draft rewrites the rest of a tree's
# state.
(
    LENGTH,
    MAX_NODES,
    MAX_DEPTH,
    MAX_BRANCHES,
    CHOICE_INDEX,
    TOP_K,
    FIRST_KV_SLOT,
    ROOT_TOKEN,
    SEED_LOW,
    SEED_HIGH,
    TEMPERATURE,
    TOP_P,
    MIN_P,
) = range(13)
NUM_COLUMNS = 16


class DraftTrees(NamedTuple):
    """State of a batch of trees of at most K branches and S levels.

    Each has C = K + (S - 1) * K * K candidates.

    Attributes:
        requests: int32 [trees, NUM_COLUMNS].
        fed_counts: int32 [trees, S + 1]; entry d counts the beams of the levels before d, entry d +
            1 also level d's.
        beam_nodes: int32 [trees, S * K]; the candidate of beam k of level d is at (d - 1) * K + k.
        masks: int64 [trees, MAX_BEAM_NODES]; each beam's bit and its ancestors' bits, in the order
            in which beams ran.
        scores: float32 [trees, C]; cumulative; -inf: no candidate.
        tokens: int32 [trees, C]; the target's ids.
        places: int32 [trees, C]; node index in the final tree, or 0.
        max_branches, max_depth: K and S.
    """

    requests: torch.Tensor
    fed_counts: torch.Tensor
    beam_nodes: torch.Tensor
    masks: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    max_branches: int
    max_depth: int

    def first(self, num_trees: int) -> DraftTrees:
        """Return the same tensors cut to the first ``num_trees`` trees."""
        return self._replace(
            requests=self.requests[:num_trees],
            fed_counts=self.fed_counts[:num_trees],
            beam_nodes=self.beam_nodes[:num_trees],
            masks=self.masks[:num_trees],
            scores=self.scores[:num_trees],
            tokens=self.tokens[:num_trees],
            places=self.places[:num_trees],
        )


class DraftBeams(NamedTuple):
    """The arrays of a level's pass; row ``b * K + k`` is beam k of tree b.

    A row without a beam reads some row's hidden state, writes to the scratch KV slot and attends to
    nothing.

    Attributes:
        token_ids, positions, kv_slots, context_lens: int32 [trees * K].
        masks: int64 [trees * K, 1].
        sources: int32 [trees * K]; the row of its input hidden state: at level 1 the tree, else a
            row of the last pass.
        row_starts: int32 [trees + 1]; K * b, whatever the level.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    masks: torch.Tensor
    sources: torch.Tensor
    row_starts: torch.Tensor

    def first(self, num_trees: int) -> DraftBeams:
        """Return the same tensors cut to the first ``num_trees`` trees."""
        rows = len(self.token_ids) // (len(self.row_starts) - 1) * num_trees
        return DraftBeams(
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            kv_slots=self.kv_slots[:rows],
            context_lens=self.context_lens[:rows],
            masks=self.masks[:rows],
            sources=self.sources[:rows],
            row_starts=self.row_starts[: num_trees + 1],
        )


class DraftOutput(NamedTuple):
    """The trees: the root first, ancestors before descendants.

    After ``num_nodes`` nodes come token 0, parent -1 and score 0.

    Attributes:
        tokens, parents: int32 [trees, nodes]; the root's parent is -1.
        scores: float32 [trees, nodes]; cumulative; the root's is 0.
        num_nodes: int32 [trees].
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    num_nodes: torch.Tensor


class OfferWorkspace(NamedTuple):
    """What the programs of a row's chunks write for the row's own program.

    Attributes:
        parts: float32 [rows, chunks, parts]; the largest value of each part of a chunk.
        sums: float32 [rows, chunks]; the sum of exp(value - the chunk's largest value).
        cuts: float32 [rows]; the lowest value that top-k, top-p and min-p keep.
    """

    parts: torch.Tensor
    sums: torch.Tensor
    cuts: torch.Tensor


def num_candidates(max_branches: int, max_depth: int) -> int:
    return max_branches + (max_depth - 1) * max_branches * max_branches


def deepest_tree(max_branches: int) -> int:
    """Return the most levels of a tree whose nodes have ``max_branches`` children, a power of two.

    At most MAX_BEAM_NODES beams run, so deeper levels would have no candidates.
    """
    return MAX_BEAM_NODES // max_branches + 1


def new_draft_trees(max_trees: int, max_branches: int, max_depth: int, device: torch.device | str) -> DraftTrees:
    """Return the state of trees without requests.

    Args:
        max_branches: a power of two up to 16.
        max_depth: levels of the deepest tree, at most deepest_tree(max_branches); 1 means children
            of the root only.

    Raises:
        ValueError: the limits are out of range.
    """
    if max_branches not in (1, 2, 4, 8, 16) or max_depth < 1 or max_trees < 1:
        raise ValueError(f"cannot grow {max_trees} draft trees of {max_branches} branches and {max_depth} levels")
    size = num_candidates(max_branches, max_depth)

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DraftTrees(
        requests=zeros(max_trees, NUM_COLUMNS),
        fed_counts=zeros(max_trees, max_depth + 1),
        beam_nodes=zeros(max_trees, max_depth * max_branches),
        masks=zeros(max_trees, MAX_BEAM_NODES, dtype=torch.int64),
        scores=zeros(max_trees, size, dtype=torch.float32),
        tokens=zeros(max_trees, size),
        places=zeros(max_trees, size),
        max_branches=max_branches,
        max_depth=max_depth,
    )


def new_draft_beams(max_trees: int, max_branches: int, device: torch.device | str) -> DraftBeams:
    rows = max_trees * max_branches
    token_ids, positions, kv_slots, context_lens, sources = torch.zeros(
        (5, rows), dtype=torch.int32, device=device
    ).unbind(0)
    return DraftBeams(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        context_lens=context_lens,
        masks=torch.zeros((rows, 1), dtype=torch.int64, device=device),
        sources=sources,
        row_starts=torch.arange(max_trees + 1, dtype=torch.int32, device=device) * max_branches,
    )
