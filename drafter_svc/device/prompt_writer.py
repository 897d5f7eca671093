"""The passes over prompts between two overlapped drafts.

The verifier leaves a prompt's hidden states in device memory, and the drafter writes its KV entries
from them. The host learns the prompt before that: it counts the entries as written, and forgets
the sequences if another step's hidden states were there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from drafter_svc.device.device_wait import DeviceWait
from drafter_svc.device.draft_stage import MAX_UNREAD_STEPS
from drafter_svc.device.levels import DeviceLevels
from drafter_svc.device.usual_drafts import PROMPT_WIDTHS, prompt_sizes
from drafter_svc.trees.figures import PassFigures
from drafter_svc.trees.passes import scratch_batch
from drafter_svc.trees.prompts import PromptPasses, PromptRows
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DeviceStep, DraftRequest, TargetInfo
from foretoken.models.device_batch import DeviceArrays
from foretoken.models.device_journal import DeviceJournal
from foretoken.models.device_sizes import PassSizes
from foretoken.overlap_memory import OverlapMemory

# Passes over prompts that may wait for a step. A device takes a limited number of launches.
_QUEUED_PASSES = 8


class _LearnedPrompts(NamedTuple):
    """The prompt rows of one request, whose KV entries may not be written yet.

    Attributes:
        number: the step that computes them.
        batch_slots: the rows' batch slots.
        work: the passes that write them.
        arrays: the rows of each pass on the device.
    """

    number: int
    batch_slots: list[int]
    work: PromptPasses
    arrays: list[DeviceArrays]


class PromptWriter:
    """Learns the prompt rows of requests and writes their KV entries.

    It holds the prompts of one request at a time: call ``check`` before the next ``learn``.

    Args:
        sizes: the largest passes of the model.
    """

    def __init__(
        self,
        levels: DeviceLevels,
        target: TargetInfo,
        sizes: PassSizes,
        rows: DraftRows,
        memory: OverlapMemory,
        wait: DeviceWait,
        figures: PassFigures,
    ) -> None:
        self._levels, self._target, self._sizes = levels, target, sizes
        self._rows, self._memory, self._wait, self._figures = rows, memory, wait, figures
        self._prompt_rows = PromptRows(rows, target, sizes.rows)
        # The stamp of each step with prompt rows.
        self._stamps = DeviceJournal({"stamp": (1,)}, MAX_UNREAD_STEPS, levels.device)
        # None: all KV entries of prompts are known to be written.
        self._learned: _LearnedPrompts | None = None

    @property
    def batch_slots(self) -> list[int]:
        """Batch slots of the prompts whose KV entries may not be written yet."""
        return [] if self._learned is None else self._learned.batch_slots

    def learn(self, request: DraftRequest, step: DeviceStep) -> None:
        """Learn a request's prompt rows, and send the rows of their passes to the device."""
        work = self._prompt_rows.learn(request)
        arrays = [self._levels.model.upload(part.batch) for part in work.passes]
        self._learned = _LearnedPrompts(step.number, request.batch_slots[step.num_batch_rows :].tolist(), work, arrays)
        self._figures.extend_tokens += sum(part.batch.num_rows for part in work.passes)

    def write(self, number: int) -> None:
        """Launch the passes over the prompts of step ``number``, if it has some.

        They read the hidden states that the step left.
        """
        learned = self._learned
        if learned is None or learned.number != number:
            return
        self._stamps.device["stamp"].copy_(self._memory.stamp)
        self._stamps.record()
        hidden, model = self._memory.prompt_hidden, self._levels.model
        for index, (part, arrays) in enumerate(zip(learned.work.passes, learned.arrays, strict=True)):
            if index and index % _QUEUED_PASSES == 0:
                # A full queue of launches waits for the device, too.
                self._wait.until_idle(number)
            first = part.first_hidden if model.hidden_width else 0
            last = first + part.batch.num_rows if model.hidden_width else 0
            model.write_prompt(arrays, hidden[first:last])

    def check_ready(self, number: int) -> None:
        """Do what ``check`` does if that need not wait."""
        if self._learned is not None and self._stamps.is_ready():
            self.check(number)

    def check(self, number: int) -> None:
        """Wait for the passes, and forget sequences whose hidden states never came.

        ``number``: the last step that a draft was requested for.
        """
        learned, self._learned = self._learned, None
        if learned is None:
            return
        self._wait.until(self._stamps.is_ready, number)
        if int(self._stamps.take()["stamp"][0]) != learned.number:
            for extension in learned.work.extensions:
                self._rows.revoke(extension)

    def warm_up(self) -> None:
        """Compile the kernels by running them in memory that nobody uses yet."""
        target, sizes, model = self._target, self._sizes, self._levels.model
        most = min(self._memory.layout.prompt_rows, sizes.rows, target.max_model_len)
        widths = {min(width, sizes.blocks) for width in (*PROMPT_WIDTHS, sizes.blocks)}
        for seqs, longest in prompt_sizes(most, sizes.seqs):
            rows = seqs - 1 + longest
            arrays = model.upload(scratch_batch(rows, target, seqs=seqs, wants_logits=False))
            for width in widths:
                tables = torch.full((seqs, width), target.num_blocks, dtype=torch.int32, device=self._levels.device)
                model.write_prompt(arrays._replace(block_tables=tables), self._memory.prompt_hidden[:rows])
