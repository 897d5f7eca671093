"""A run of overlapped drafts: from one request that names the batch rows to the next."""

from __future__ import annotations

import numpy as np
from foretoken_kernels.cpu import draft_tree as kernel
from numpy.typing import NDArray

from drafter_svc.device.batch_rows import BatchRows
from drafter_svc.device.device_wait import DeviceWait
from drafter_svc.device.draft_stage import DraftStage, NewBlocks
from drafter_svc.device.draft_stages import DraftStages
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.rows import DraftRows, DraftSequence
from foretoken.drafting import DeviceStep, DraftRequest


class DraftRun:
    """Launches the drafts of one run, and later brings the drafter's rows up to date.

    Args:
        request: names the sequences of all batch rows.
        last_sequences: numbers of the sequences that had a batch row at the end of the last run.

    Attributes:
        number: the last step that a draft was requested for.
        batch: the batch rows.
    """

    def __init__(
        self,
        request: DraftRequest,
        step: DeviceStep,
        stages: DraftStages,
        rows: DraftRows,
        wait: DeviceWait,
        figures: PassFigures,
        last_sequences: frozenset[int],
    ) -> None:
        self._stages, self._rows, self._wait, self._figures = stages, rows, wait, figures
        self._block_size = stages.levels.block_size
        self.number = step.number
        named = request.rows[: step.num_batch_rows]
        stages.request_trees(named)
        self.batch = BatchRows(named["batch_slots"].tolist())
        self.batch.wants_tree = stages.requested.shapes[: len(named), kernel.MAX_DEPTH] > 0
        self._find_sequences(named, request, last_sequences)
        # None: the run has no batch rows, and its steps only compute prompts.
        self._stage: DraftStage | None = stages.set_up(self.batch, step.number) if len(named) else None

    def _find_sequences(self, named: NDArray[np.void], request: DraftRequest, last_sequences: frozenset[int]) -> None:
        """Find the sequences that are known, and append their blocks."""
        batch, rows = self.batch, self._rows
        generations, salts, lengths = (named[name].tolist() for name in ("generations", "salts", "lengths"))
        starts, block_ids = request.block_starts.tolist(), request.block_ids.tolist()
        for index, length in enumerate(lengths):
            sequence = rows.find(batch.batch_slots[index], generations[index], salts[index])
            if sequence is None:
                continue
            known = sequence.length
            if known < length or (known > length and sequence.number not in last_sequences):
                continue
            batch.sequences[index] = sequence
            batch.is_drafted[index] = is_drafted = rows.can_go_on(sequence)
            first, ids = rows.num_blocks(length), block_ids[starts[index] : starts[index + 1]]
            if ids and not rows.append_blocks(sequence, first, ids):
                self._drop(index, sequence)
                continue
            batch.num_blocks[index] = num_blocks = max(first + len(ids), rows.num_blocks(known))
            if is_drafted:
                # The block that it has begun, too, if it has.
                rows.claim_blocks(sequence, known // self._block_size, num_blocks)

    def is_followed_by(self, step: DeviceStep) -> bool:
        """Return whether a step is this run's next one."""
        return step.number == self.number + 1 and step.num_batch_rows == len(self.batch)

    def append_blocks(self, request: DraftRequest) -> None:
        """Append the new blocks of a later request, and send them."""
        batch, rows = self.batch, self._rows
        starts, block_ids = request.block_starts, request.block_ids.tolist()
        added: list[NewBlocks] = []
        for index in np.flatnonzero(starts[1:] > starts[:-1]).tolist():
            sequence, first = batch.sequences[index], batch.num_blocks[index]
            if sequence is None:
                continue
            ids = block_ids[starts[index] : starts[index + 1]]
            if not rows.append_blocks(sequence, first, ids):
                self._drop(index, sequence)
                continue
            batch.num_blocks[index] += len(ids)
            if batch.is_drafted[index]:
                rows.claim_blocks(sequence, first, batch.num_blocks[index])
                added.append(NewBlocks(index, first, ids))
        stage = self._stage
        if stage is None or not added:
            return
        if any(batch.num_blocks[batch_row] > stage.capacity for batch_row, _, _ in added):
            # Seldom: the tables' sizes double.
            self.read_all()
            self._stage = self._stages.set_up(batch, self.number)
            return
        stage.send_blocks(added)

    def launch(self) -> None:
        """Launch the draft, or only stamp it if there are no batch rows."""
        stage, graphs = self._stage, self._stages.graphs
        if stage is None:
            self._stages.memory.draft_stamp.fill_(self.number)
            return
        if graphs.captures(stage.shape):
            # A capture waits for the device.
            self._wait.until_idle(self.number)
        graphs.run(stage.shape, stage.launch)

    def record(self) -> None:
        """Copy what the draft took from its step, for a later read."""
        if self._stage is None:
            return
        journal = self._stage.journal
        if len(journal) == journal.depth:
            self._read_next(self._stage)
        journal.record()

    def read_ready(self) -> None:
        """Read all steps that have arrived."""
        stage = self._stage
        while stage is not None and len(stage.journal) and stage.journal.is_ready():
            self._read_next(stage)

    def read_all(self) -> None:
        """Wait for all steps and read them."""
        stage = self._stage
        while stage is not None and len(stage.journal):
            self._read_next(stage)

    def _read_next(self, stage: DraftStage) -> None:
        """Bring the rows up to date with the oldest step that is unread."""
        self._wait.until(stage.journal.is_ready, self.number)
        batch, taken = self.batch, stage.journal.take()
        # The others have ended, or the step is lost, and there is a gap.
        has_tokens = taken["counts"][: len(batch)] > 0
        batch.wants_tree &= has_tokens
        counts, lengths, written = (taken[name].tolist() for name in ("counts", "lengths", "is_written"))
        for index in np.flatnonzero(has_tokens).tolist():
            sequence, num_tokens, is_written = batch.sequences[index], counts[index], bool(written[index])
            if sequence is None:
                continue
            goes_on = (
                lengths[index] == sequence.length + num_tokens
                and lengths[index] <= batch.num_blocks[index] * self._block_size
                and is_written == batch.is_drafted[index]
            )
            tokens = taken["tokens"][index, :num_tokens].tolist()
            if not goes_on or not self._rows.advance(sequence, tokens, is_written=is_written):
                self._drop(index, sequence)
            elif is_written:
                self._figures.extend_tokens += num_tokens

    def _drop(self, index: int, sequence: DraftSequence) -> None:
        """Drop a sequence that was sent contradictory data. Its kernels soon find no blocks."""
        self._rows.drop(sequence)
        self.batch.empty(index)
