"""The forward passes of a draft request: new KV entries, then one pass a level for all trees.

A draft model is a function of a flat batch here. rows.py knows which KV entries are valid; the
kernels' draft_tree chooses nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.decoder import NUM_FIELDS, forward_function
from foretoken_kernels.cpu.draft_levels import NO_OUTPUT, DraftVocabulary, LevelPass, Places, growth_function
from numpy.typing import NDArray

from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.growth import (
    ROWS_PER_BATCH_SLOT,
    DraftsFromMemory,
    GrowsFromMemory,
    GrowthMaker,
    PassOutput,
    set_tree_requests,
)
from drafter_svc.trees.rows import DraftRows, DraftSequence, Extension, sent_rows
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.batch import ForwardBatch, chain_batch
from foretoken.models.forward_pass import ELEMENTS
from foretoken.overlap_memory import OverlapMemory, StreamOrder
from foretoken.tree import Int32

Float32 = NDArray[np.float32]

# Most rows of a pass that writes new KV entries; longer prompts take several passes.
PASS_ROWS = 512
# KV entries that a row may write although the request's budget is spent: a long prompt must not
# stop other rows.
SMALL_EXTENSION = 64
# Minimum number of KV-only rows that justify a separate pass. A smaller pass is bound by reading
# the weights, on a CPU and on a GPU.
ENTRY_ROWS, GPU_ENTRY_ROWS = 24, 256
# Scale of the coupled score, in logits. If a drafter's logits had Gumbel errors of scale s, a
# token's chance to win at temperature T would be exactly the softmax of its noised value times T /
# s, at any T (the Gumbel-max trick). Normal errors of deviation 1 have the variance of s = sqrt(6)
# / pi = 0.78. Measured with draft models made of the demo target with noise on its weights (3.4 and
# 4.6 tokens a greedy step), 0.6 to 0.8 gave the most tokens a step at T = 0.7 and 1.0: the better
# model up to 0.05 more at 0.6, the other up to 0.09 more at 0.8.
COUPLING_SCALE = 0.8


class DraftModel(Protocol):
    """A draft model as passes use it: foretoken.models.draft_head.DraftHead, or a StandaloneModel.

    ``hidden_size`` and ``hidden_width`` are 0 for a model that reads tokens only.
    ``write_kv_entries`` writes the KV entries of KV-only rows from the target's hidden states; None
    if only ``forward`` can.
    """

    num_depths: int
    hidden_size: int
    hidden_width: int
    draft_vocab_size: int
    target_ids: NDArray[np.int32] | None

    @property
    def write_kv_entries(self) -> Callable[[ForwardBatch, Float32], None] | None: ...
    def forward(self, batch: ForwardBatch, hidden: Float32, *, from_target: bool, depth: int = 0) -> PassOutput: ...


class _PassPiece(NamedTuple):
    """KV slots [start, stop) of an extension, from flat row ``first`` of a pass on."""

    extension: Extension
    start: int
    stop: int
    first: int


class DraftPasses:
    """Runs one model for one attachment. Not for two threads at once.

    Args:
        make_growth: makes what grows the trees, from the scale of the coupled score.
        budget: most KV entries that long rows of one request write; a row is drafted for once it
            has all of them.
        coupled: whether drafts for temperatures above zero use the sampler's noise.
        entry_rows: minimum number of KV-only rows that justify a separate pass.
    """

    def __init__(
        self,
        model: DraftModel,
        target: TargetInfo,
        rows: DraftRows,
        *,
        make_growth: GrowthMaker,
        budget: int | None = None,
        coupled: bool = True,
        entry_rows: int = ENTRY_ROWS,
    ) -> None:
        self._model = model
        self._target = target
        self._rows = rows
        self._budget = budget
        self._entry_rows = entry_rows
        self.figures = PassFigures()
        self._block_size = target.block_size
        max_rows = ROWS_PER_BATCH_SLOT * target.max_batch_slots
        self._tree_blocks = scratch_blocks_per_row(target)
        self._tables = np.zeros((max_rows, rows.max_blocks + self._tree_blocks), np.int32)
        # The scratch blocks of each tree.
        self._scratch = np.arange(target.num_blocks, cache_blocks(target), dtype=np.int32).reshape(
            target.max_batch_slots, -1
        )
        self._tree_starts = np.zeros(max_rows, np.int32)
        self._context_starts = np.zeros(max_rows, np.int32)
        scale = COUPLING_SCALE if coupled else 0.0
        self._growth = make_growth(scale)
        self._all_rows = np.arange(max_rows, dtype=np.int32)
        self._hidden = np.zeros((PASS_ROWS, model.hidden_width), np.float32)
        self._no_masks = np.zeros((PASS_ROWS, 1), np.uint64)
        # For each module but the last and each block: the output at the block's last written KV
        # slot. The next module reads it with the token of the next KV slot.
        self._carry = np.zeros((model.num_depths - 1, target.num_blocks, model.hidden_size), np.float32)
        self._overlapped: DraftsFromMemory | None = None

    def draft(self, request: DraftRequest) -> DraftBatch:
        """Learn the new tokens, write their KV entries and grow a tree for each row if possible.

        Raises ValueError for a request with too many rows, or with tokens in device memory if none
        was set.
        """
        started = perf_counter()
        if request.device_step is not None:
            if self._overlapped is None:
                raise ValueError("the request's tokens are in device memory, but none was set")
            batch = self._overlapped.draft(request)
            self.figures.grow_s += perf_counter() - started
            return batch
        if self._overlapped is not None:
            self._overlapped.finish()
        if request.num_rows > len(self._tables):
            raise ValueError(f"a request of {request.num_rows} rows, more than two a batch slot")
        set_tree_requests(self._growth.trees, request.rows, self._target.max_nodes)
        roots = np.zeros(request.num_rows, np.int32)
        drafted = self._extend(request, request.num_rows, roots)
        extended = perf_counter()
        if drafted:
            places = Places(self._tables, self._tree_starts, self._module_starts(), self._block_size)
            self._growth.grow(np.array(drafted, np.int32), places)
        batch = self._growth.emit(request, roots)
        self.figures.rows += request.num_rows
        self.figures.drafted_rows += len(drafted)
        self.figures.extend_s += extended - started
        self.figures.grow_s += perf_counter() - extended
        return batch

    def set_overlap_memory(self, memory: OverlapMemory, order: StreamOrder) -> None:
        """Draft from this memory on request. Raises PreconditionError if it cannot be used."""
        if not isinstance(self._growth, GrowsFromMemory):
            raise PreconditionError("a drafter on the CPU does not draft from device memory")
        self._overlapped = self._growth.overlapped_draft(self._rows, self._scratch, memory, order, self.figures)

    @property
    def is_prepared(self) -> bool:
        """Return whether ``prepare`` has nothing left to do."""
        return self._overlapped is None or self._overlapped.is_prepared

    def prepare(self) -> bool:
        """Prepare as DraftsOverlapped says."""
        return self._overlapped is not None and self._overlapped.prepare()

    def release(self, batch_slots: Sequence[int]) -> None:
        """Forget batch slots.

        Once all are released, nothing reads the device memory that was set.
        """
        if self._overlapped is not None:
            self._overlapped.release(batch_slots)
        for batch_slot in batch_slots:
            self._rows.release(batch_slot)

    def _extend(self, request: DraftRequest, num_rows: int, roots: Int32) -> list[int]:
        """Write the KV entries of all rows and offer the roots' children.

        Return the rows that have any.
        """
        left = self._budget
        waiting: list[Extension] = []
        drafted: list[int] = []
        order, may_clash = _order(request, num_rows)
        rows = sent_rows(request)
        for row in order:
            sent = rows[row]
            if sent.tokens:
                roots[row] = sent.tokens[-1]
            sequence = self._rows.learn(sent)
            if sequence is None:
                continue
            if not sent.tokens:
                roots[row] = sequence.tokens[sequence.length - 1]
            most = self._target.max_model_len if left is None else max(left, SMALL_EXTENSION)
            extension = self._rows.extend(sent, sequence, most)
            if extension is None:
                continue
            if left is not None:
                left -= extension.stop - extension.start
            if may_clash and any(self._clash(earlier, extension) for earlier in waiting):
                self._run_extensions(request, waiting, drafted)
                waiting = []
            self._set_row(row, sequence)
            waiting.append(extension)
        self._run_extensions(request, waiting, drafted)
        return drafted

    def _clash(self, earlier: Extension, later: Extension) -> bool:
        """Return whether the later row writes to a block of the earlier, or continues from one.

        Such rows need separate passes: within a pass KV entries are written in no order, and
        outputs are carried over only from pass to pass.
        """
        size = self._block_size
        held = earlier.sequence.table[: self._rows.num_blocks(earlier.stop)]
        written = later.sequence.table[later.start // size : self._rows.num_blocks(later.stop)]
        if np.isin(written, held).any():
            return True
        fresh = held[earlier.start // size :]
        return len(self._carry) > 0 and bool(np.isin(fresh, later.sequence.table[: later.start // size]).any())

    def _set_row(self, row: int, sequence: DraftSequence) -> None:
        """Fill the row's block table: its blocks, then the blocks of its tree."""
        num_blocks = self._rows.num_blocks(sequence.length)
        self._tables[row, :num_blocks] = sequence.table[:num_blocks]
        self._context_starts[row] = sequence.valid_start
        self._tree_starts[row] = num_blocks * self._block_size
        self._growth.trees.counts[row, kernel.FIRST_KV_SLOT] = self._tree_starts[row]

    def _run_extensions(self, request: DraftRequest, extensions: list[Extension], drafted: list[int]) -> None:
        """Write KV entries, PASS_ROWS a pass at most; add rows with children to ``drafted``."""
        pieces: list[_PassPiece] = []
        used = 0
        for extension in extensions:
            start = extension.start
            while start < extension.stop:
                stop = min(extension.stop, start + PASS_ROWS - used)
                pieces.append(_PassPiece(extension, start, stop, used))
                used += stop - start
                start = stop
                if used == PASS_ROWS:
                    self._run_pieces(request, pieces, used, drafted)
                    pieces, used = [], 0
        if pieces:
            self._run_pieces(request, pieces, used, drafted)

    def _run_pieces(self, request: DraftRequest, pieces: list[_PassPiece], used: int, drafted: list[int]) -> None:
        tokens = np.concatenate([extension.sequence.tokens[start:stop] for extension, start, stop, _ in pieces])
        sizes = [piece.stop - piece.start for piece in pieces]
        seqs = np.repeat(np.array([piece.extension.row for piece in pieces], np.int32), sizes)
        offsets = np.array([piece.start - piece.first for piece in pieces], np.int32)
        positions: Int32 = np.repeat(offsets, sizes)
        positions += np.arange(used, dtype=np.int32)
        ends: list[int] = []
        rows: list[int] = []
        for piece, size in zip(pieces, sizes, strict=True):
            row, sequence = piece.extension.row, piece.extension.sequence
            if piece.stop == sequence.length and self._wants_tree(row, len(drafted) + len(rows)):
                ends.append(piece.first + size - 1)
                rows.append(row)
        kv_slots = self._kv_slots(seqs, positions)
        logit_rows = np.array(ends, np.int32)
        batch = self._batch(tokens, positions, kv_slots, seqs, positions + 1, self._no_masks[:used], logit_rows)
        hidden = self._gather_hidden(request, pieces, used)
        self.figures.extend_tokens += used
        write_kv_entries = self._model.write_kv_entries
        if write_kv_entries is not None and used - len(ends) >= self._entry_rows:
            # First the KV-only rows.
            is_end = np.zeros(used, np.bool_)
            is_end[ends] = True
            others = np.flatnonzero(~is_end)
            write_kv_entries(self._select(batch, others), hidden[others])
            if not ends:
                return
            batch = self._select(batch, logit_rows, logit_rows=self._all_rows[: len(ends)])
            hidden, ends = hidden[logit_rows], list(range(len(ends)))
        output = self._model.forward(batch, hidden, from_target=True)
        if rows:
            self._growth.offer_roots(output, np.array(rows, np.int32), ends, len(drafted))
            drafted += rows
        if self._model.num_depths > 1:
            self._run_deeper(batch, _on_host(output.hidden).copy(), pieces)

    def _wants_tree(self, row: int, num_before: int) -> bool:
        """Return whether a row wants a tree and scratch blocks are left; assign them to it."""
        if self._growth.trees.shapes[row, kernel.MAX_DEPTH] < 1 or num_before == self._target.max_batch_slots:
            return False
        block = int(self._tree_starts[row]) // self._block_size
        self._tables[row, block : block + self._tree_blocks] = self._scratch[num_before]
        self.figures.window_rows += int(self._context_starts[row] > self._rows.first_position)
        return True

    def _gather_hidden(self, request: DraftRequest, pieces: list[_PassPiece], used: int) -> Float32:
        if not self._model.hidden_width:
            return self._hidden[:used]
        if request.hidden.shape[1:] != (self._model.hidden_width,):
            raise ValueError(f"hidden states of {request.hidden.shape[1:]}, expected {self._model.hidden_width} wide")
        firsts = [extension.first_hidden + start - extension.start for extension, start, _, _ in pieces]
        if all(first - piece.first == firsts[0] for first, piece in zip(firsts, pieces, strict=True)):
            # As in most requests: the hidden states of all rows are in the order of the pieces.
            return request.hidden[firsts[0] : firsts[0] + used]
        for first, (_, start, stop, at) in zip(firsts, pieces, strict=True):
            self._hidden[at : at + stop - start] = request.hidden[first : first + stop - start]
        return self._hidden[:used]

    def _run_deeper(self, batch: ForwardBatch, outputs: Float32, pieces: list[_PassPiece]) -> None:
        """Extend the modules after the first; each reads the module before, one KV slot earlier."""
        size = self._block_size
        for depth in range(1, self._model.num_depths):
            inputs = np.empty_like(outputs)
            inputs[1:] = outputs[:-1]
            for extension, start, stop, at in pieces:
                table, carry = extension.sequence.table, self._carry[depth - 1]
                inputs[at] = carry[table[(start - 1) // size]]
                # The last KV slot that this piece writes in each block.
                blocks = np.arange(start // size, -(-stop // size))
                carry[table[blocks]] = outputs[at + np.minimum((blocks + 1) * size, stop) - 1 - start]
            kept = np.flatnonzero(batch.positions >= self._context_starts[batch.row_seqs] + depth)
            if not len(kept):
                return
            output = self._model.forward(self._select(batch, kept, depth), inputs[kept], from_target=False, depth=depth)
            outputs[kept] = _on_host(output.hidden)

    def _select(
        self, batch: ForwardBatch, kept: NDArray[np.intp] | Int32, depth: int = 0, logit_rows: Int32 | None = None
    ) -> ForwardBatch:
        """Return some rows of an extension, for the module of ``depth``."""
        return self._batch(
            batch.token_ids[kept],
            batch.positions[kept],
            batch.kv_slots[kept],
            batch.row_seqs[kept],
            batch.context_lens[kept],
            self._no_masks[: len(kept)],
            np.empty(0, np.int32) if logit_rows is None else logit_rows,
            depth,
        )

    def _module_starts(self) -> Int32:
        """Return int32 [modules, rows]: the first KV slot with an entry of each module."""
        depths = np.arange(self._model.num_depths, dtype=np.int32)
        lengths = self._growth.trees.shapes[:, kernel.LENGTH]
        starts: Int32 = np.minimum(self._context_starts + depths[:, None], lengths)
        return starts

    def _kv_slots(self, seqs: Int32, positions: Int32) -> Int32:
        size = self._block_size
        return self._tables[seqs, positions // size] * size + positions % size

    def _batch(
        self,
        tokens: Int32,
        positions: Int32,
        kv_slots: Int32,
        seqs: Int32,
        context_lens: Int32,
        masks: NDArray[np.uint64],
        logit_rows: Int32,
        depth: int = 0,
    ) -> ForwardBatch:
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            kv_slots=kv_slots,
            row_seqs=seqs,
            context_lens=context_lens,
            masks=masks,
            tree_starts=self._tree_starts,
            block_tables=self._tables,
            logit_rows=logit_rows,
            context_starts=self._context_starts + np.int32(depth) if depth else self._context_starts,
        )


def scratch_blocks_per_row(target: TargetInfo) -> int:
    """Return how many blocks hold the beams of one tree."""
    beams = min(kernel.MAX_BEAM_NODES, max(target.max_nodes - 1, 1) * max(target.max_nodes - 2, 1))
    return -(-beams // target.block_size)


def cache_blocks(target: TargetInfo) -> int:
    """Return the blocks of the drafter's cache: the verifier's, then scratch for all trees."""
    return target.num_blocks + target.max_batch_slots * scratch_blocks_per_row(target)


def scratch_batch(rows: int, target: TargetInfo, *, seqs: int = 1, wants_logits: bool = True) -> ForwardBatch:
    """Return rows that write to, and attend to, only the first KV slot of scratch.

    The other KV slots may hold anything.

    Args:
        seqs: sequences of the rows; all but the first have one row.
        wants_logits: whether the logits of the last row are wanted.
    """
    wanted = np.array([rows - 1] if wants_logits else [], np.int32)
    chain = chain_batch(np.zeros(rows, np.int32), 0, target.block_size, wanted)
    seq_of_row = np.maximum(np.arange(rows, dtype=np.int32) - (rows - seqs), 0)
    return replace(
        chain,
        kv_slots=np.full(rows, target.num_blocks * target.block_size, np.int32),
        row_seqs=seq_of_row,
        context_lens=np.ones(rows, np.int32),
        tree_starts=np.zeros(seqs, np.int32),
        block_tables=np.full((seqs, chain.block_tables.shape[1]), target.num_blocks, np.int32),
    )


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or load, the kernels of drafting and of passes over a cache of this element type."""
    trees, beams = kernel.new_trees(1, 2, 2), kernel.new_beams(1)
    one, none = np.zeros(1, np.int32), np.full(1, -1, np.int32)
    no_ids = np.empty(0, np.int32)
    kernel.offer_children(trees, np.zeros(2, np.float32), 2, 2, no_ids, one, none, 0, COUPLING_SCALE)
    # Trees of depth 0: no pass runs.
    table, hidden = np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32)
    level = LevelPass(np.zeros(NUM_FIELDS, np.int64), np.zeros((1, 2), np.int64), 0, 1, NO_OUTPUT, 0, 1, (1, 1, 1, 1))
    places, vocabulary = Places(table, one, table, 1), DraftVocabulary(2, 2, no_ids)
    growth_function()(trees, one, places, beams, level, hidden, hidden, vocabulary, one, COUPLING_SCALE)
    kernel.emit_trees(trees, one, np.zeros(2, np.int32), one.copy(), one.copy(), np.zeros(1, np.float32))
    forward_function(ELEMENTS[dtype])


def _on_host(tensor: torch.Tensor) -> Float32:
    """Return a tensor as a float32 array; it shares memory if it is one on the CPU already."""
    values: Float32 = tensor.to(torch.float32).cpu().numpy()
    return values


def _order(request: DraftRequest, num_rows: int) -> tuple[Sequence[int], bool]:
    """Return rows in the order of learning, and whether a block may have moved between them.

    The last tokens of an ended sequence come in a row of one node; another row may own its blocks
    by now.
    """
    learns_only = request.max_nodes[:num_rows] <= 1
    if not learns_only.any():
        return range(num_rows), False
    return np.argsort(~learns_only, kind="stable").tolist(), num_rows > 1
