"""Lay out a step as the flat rows that the target runs over (foretoken.models.batch)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch
from foretoken.tree import MASK_WORD_BITS, DraftTree, Int32, ancestor_mask, depths
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence


@dataclass(slots=True)
class Scheduled:
    """A sequence's part of a step: its next ``num_tokens`` tokens, then its tree if it decodes."""

    sequence: Sequence
    num_tokens: int
    # Most nodes that its blocks hold, including the root.
    max_nodes: int
    draft: Draft | None = None
    # Positions before the first token that run again, only for their hidden states.
    num_rerun: int = 0
    # Whether its drafters want this pass's hidden states. Kept here, since drafters come and go.
    wants_hidden_states: bool = False
    # Whether the sequence was decoding when this part was scheduled.
    was_decoding: bool = field(init=False)

    def __post_init__(self) -> None:
        self.was_decoding = self.sequence.is_decoding

    @property
    def tree(self) -> DraftTree | None:
        return self.draft.tree if self.draft is not None else None

    @property
    def samples(self) -> bool:
        """Return whether this step computes the last token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def num_rows(self) -> int:
        return self.num_rerun + self.num_tokens + (self.tree.num_speculative_tokens if self.tree else 0)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of a step.

    Sequence ``i`` has the logits ``logit_starts[i]:logit_starts[i + 1]``. Its rows begin at
    ``row_starts[i]``: first the positions that run again, then its tokens, then the tree's nodes
    without the root.
    """

    forward: ForwardBatch
    logit_starts: list[int]
    row_starts: list[int]


def build_batch(scheduled: list[Scheduled], block_size: int, scratch_kv_slot: int) -> StepBatch:
    """Return a step's sequences as rows.

    Positions that run again read their old KV entries, which other sequences may share, and write
    new KV entries to ``scratch_kv_slot``.

    A tree's nodes take the logical KV slots after the root in index order, whatever their depth.
    The nodes of a chain see one contiguous run, so they need no mask.
    """
    # Lists, because most steps have few rows: one array of them takes less time than to fill a part
    # of an array for each sequence.
    tokens: list[int] = []
    places: list[int] = []
    seqs: list[int] = []
    # Each tree with its sequence, its root's position, and the first row of its other nodes.
    trees: list[tuple[DraftTree, int, int, int]] = []
    logit_rows: list[int] = []
    logit_starts = [0]
    row_starts: list[int] = []
    rerun_rows: list[int] = []
    for index, part in enumerate(scheduled):
        sequence, tree = part.sequence, part.tree
        first, row = sequence.num_computed, len(tokens)
        own = range(first - part.num_rerun, first + part.num_tokens)
        row_starts.append(row)
        rerun_rows += range(row, row + part.num_rerun)
        tokens += sequence.tokens[own.start : own.stop]
        places += own
        end = len(tokens)
        if tree is not None and tree.num_speculative_tokens:
            trees.append((tree, index, first + part.num_tokens - 1, end))
            tokens += tree.tokens.tolist()[1:]
            places += [0] * tree.num_speculative_tokens
        last = len(tokens)
        seqs += [index] * (last - row)
        if sequence.wants_prompt_logprobs and first < sequence.num_prompt_tokens:
            logit_rows += range(row + part.num_rerun, last)
        elif part.samples:
            logit_rows += range(end - 1, last)
        logit_starts.append(len(logit_rows))
    max_nodes = max((tree.num_nodes for tree, *_ in trees), default=1)
    token_ids, positions, row_seqs = (np.array(values, np.int32) for values in (tokens, places, seqs))
    logical, context_lens = positions.copy(), positions + np.int32(1)
    masks = np.zeros((len(tokens), -(-max_nodes // MASK_WORD_BITS)), np.uint64)
    tree_starts = np.zeros(len(scheduled), np.int32)
    for tree, index, root_position, first_row in trees:
        _place_nodes(tree, root_position, first_row, positions, logical, context_lens, masks)
        tree_starts[index] = root_position
    block_tables = _block_tables(scheduled)
    kv_slots = block_tables[row_seqs, logical // block_size] * block_size + logical % block_size
    if rerun_rows:
        kv_slots[rerun_rows] = scratch_kv_slot
    forward = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        row_seqs=row_seqs,
        context_lens=context_lens,
        masks=masks,
        tree_starts=tree_starts,
        block_tables=block_tables,
        logit_rows=np.array(logit_rows, np.int32),
    )
    return StepBatch(forward, logit_starts, row_starts)


def _place_nodes(
    tree: DraftTree,
    root_position: int,
    first_row: int,
    positions: Int32,
    logical: Int32,
    context_lens: Int32,
    masks: NDArray[np.uint64],
) -> None:
    """Fill the rows of a tree's nodes 1 .. num_nodes - 1, from ``first_row`` on."""
    rows = slice(first_row, first_row + tree.num_speculative_tokens)
    nodes = np.arange(1, tree.num_nodes, dtype=np.int32)
    logical[rows] = root_position + nodes
    if (tree.parents[1:] == nodes - 1).all():
        positions[rows] = root_position + nodes
        context_lens[rows] = root_position + nodes + 1
        return
    positions[rows] = root_position + depths(tree.parents)[1:]
    context_lens[rows] = root_position + 1
    visible = ancestor_mask(tree.parents)[1:]
    # The contiguous run already includes the root.
    visible[:, 0] &= ~np.uint64(1)
    masks[rows, : visible.shape[1]] = visible


def _block_tables(scheduled: list[Scheduled]) -> Int32:
    """Return the block tables as int32 [seqs, most blocks of one sequence]."""
    tables = [part.sequence.block_ids for part in scheduled]
    width = max(len(blocks) for blocks in tables)
    if len(tables) == 1:
        return np.array([tables[0]], np.int32)
    out = np.zeros((len(tables), width), np.int32)
    for index, blocks in enumerate(tables):
        out[index, : len(blocks)] = blocks
    return out


def commit_kv_slots(sequence: Sequence, accepted: list[int], block_size: int) -> tuple[list[int], list[int]]:
    """Return the KV slots (from, to) to copy so that accepted nodes are contiguous after the root.

    ``accepted``: node indices along the path. Nodes that are already in place are left out.
    """
    root = len(sequence.tokens) - 1
    blocks = sequence.block_ids
    source: list[int] = []
    target: list[int] = []
    for depth, node in enumerate(accepted, start=1):
        if node == depth:
            continue
        old, new = root + node, root + depth
        source.append(blocks[old // block_size] * block_size + old % block_size)
        target.append(blocks[new // block_size] * block_size + new % block_size)
    return source, target
