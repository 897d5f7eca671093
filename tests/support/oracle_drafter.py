"""A drafter that knows the texts: it drafts right and wrong tokens and checks what it is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from foretoken.drafting import DeviceStep, DraftBatch, DrafterNeeds, DraftRequest
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.transports.transport import TransportClosedError

Way = Literal["run", "fed", "host"]


def way_of(request: DraftRequest) -> Way:
    step = request.device_step
    if step is None:
        return "host"
    return "fed" if step.begins and step.is_last else "run"


class OracleDrafter:  # large: a drafter's whole state, checked step by step
    """A DraftSource, on the target's device.

    Args:
        texts: whole texts, prompts included, no two with the same first tokens.
        spoil: called with the number of each step; whether its trees are to be left out.
        width: the width of the target's hidden states.
        tolerance: how far one position's hidden state may differ from step to step.
    """

    name = "oracle"
    algorithm = "EAGLE3"
    address = ""
    transport_name = "in-process"
    state = "attached"
    num_rejected = 0
    reason = ""

    def __init__(  # noqa: PLR0913 - sizes of a drafter in overlapped steps
        self,
        texts: Sequence[list[int]],
        device: str,
        *,
        captured_layers: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        batch_rows: int,
        nodes: int,
        block_size: int,
        spoil: Callable[[int], bool] = lambda number: False,
        tolerance: float = 2e-2,
        prompt_rows: int = 64,
    ) -> None:
        self._tolerance = tolerance
        self._texts, self._spoil, self._block_size = texts, spoil, block_size
        self.needs = DrafterNeeds(captured_layers, num_rerun=1, blocks=True)
        self.gauges: dict[str, float] = {}
        layout = OverlapLayout(batch_rows, 4, nodes, width, dtype, prompt_rows)
        self.overlap_memory = OverlapMemory.over(
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout
        )
        self.failures: list[str] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        # Hidden states by text and position.
        self.hidden: dict[tuple[int, int], np.ndarray] = {}
        self.blocks: dict[tuple[int, int], list[int]] = {}
        # Tokens of each sequence that came without the hidden state before them.
        self.num_without_hidden: dict[tuple[int, int], int] = {}
        # By batch row; None for an empty one.
        self._keys: list[tuple[int, int] | None] = []
        self._batch: DraftBatch | None = None
        self.is_closed = False
        self.num_attaches = 1
        self._attachment = _Attachment(self)
        # The overlapped requests of this attachment: their steps, and how many blocks each named.
        self.numbers: list[int] = []
        self.num_named: list[int] = []
        # The steps of the requests that ended runs.
        self.ends: list[int] = []
        # The last step with hidden states of prompts, and where these began.
        self._prompts_at = (-1, -1)
        # Requests that named their sequences anew.
        self.num_begins = 0
        # Rows that sent prompts within a run.
        self.num_prompt_rows = 0
        # How each request came: within a run, as a run of one step, or by the host.
        self.ways: list[Way] = []
        # Whether it has answered everything, as the verifier sees it.
        self.is_idle = True
        # Sequences that it was asked to forget, or whose batch slot it was sent another one of.
        self.forgotten: list[tuple[int, int]] = []

    @property
    def transport(self) -> _Attachment | None:
        return None if self.is_closed else self._attachment

    # The source.

    def start(self) -> None:
        return

    def attach_anew(self) -> None:
        """Attach again, with new memory and nothing known."""
        layout, device = self.overlap_memory.layout, self.overlap_memory.stamp.device
        self.overlap_memory = OverlapMemory.over(
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout
        )
        self.num_attaches += 1
        self._attachment = _Attachment(self)
        self.tokens, self.blocks, self.numbers, self._keys = {}, {}, [], []
        self._prompts_at = (-1, -1)

    def close(self) -> None:
        self.is_closed = True

    def report_failure(self, reason: str) -> None:
        self.failures.append(reason)

    def report_success(self) -> None:
        return

    def answer(self) -> DraftBatch | None:
        """Return the answer to the last request."""
        batch, self._batch = self._batch, None
        return batch

    def release(self, batch_slots: Sequence[int]) -> None:
        gone = [key for key in self.tokens if key[0] in batch_slots]
        self.forgotten += gone
        for key in gone:
            del self.tokens[key], self.blocks[key]

    def post(self, request: DraftRequest) -> None:
        starts, tokens, parents = [0], [], []
        self.ways.append(way_of(request))
        if request.device_step is not None:
            self._learn_device_step(request)
        for row in range(request.num_rows):
            if request.device_step is not None and (row >= len(self._keys) or self._keys[row] is None):
                tokens.append(0)
                parents.append(-1)
                starts.append(len(tokens))
                continue
            key = (int(request.batch_slots[row]), int(request.generations[row]))
            if request.device_step is None:
                self._learn(request, row, key)
                most = int(request.max_nodes[row])
            else:
                left = int(self.overlap_memory.num_left[row])
                most = min(int(request.max_nodes[row]), left)
            tree = self._tree(self.tokens[key]) if most > 1 else ([0], [-1])
            if request.device_step is not None:
                self._put(row, tree, most)
                if not request.device_step.is_last:
                    tree = ([0], [-1])
            tokens += tree[0][:most] or [0]
            parents += tree[1][:most] or [-1]
            starts.append(len(tokens))
        if request.device_step is not None and not self._spoil(request.device_step.number):
            self.overlap_memory.draft_stamp.fill_(request.device_step.number)
        arrays = (np.array(values, np.int32) for values in (starts, tokens, parents))
        self._batch = DraftBatch(request.epoch, request.step_id, *arrays, np.zeros(len(tokens), np.float32))

    def _learn(self, request: DraftRequest, row: int, key: tuple[int, int]) -> None:
        new = request.new_tokens[slice(*request.new_token_starts[row : row + 2])].tolist()
        hidden = request.hidden[slice(*request.hidden_starts[row : row + 2])]
        self._append(key, new, hidden)
        assert len(self.tokens[key]) == request.lengths[row], "a token was sent twice, or never"
        sent = len(self.tokens[key]) - len(new)
        blocks = request.block_ids[slice(*request.block_starts[row : row + 2])].tolist()
        known = self.blocks.setdefault(key, [])
        if blocks:
            known[sent // self._block_size :] = blocks

    def _learn_device_step(self, request: DraftRequest) -> None:
        memory, step = self.overlap_memory, request.device_step
        assert step is not None and memory.stamp.tolist() == [step.number]
        assert step.begins or step.number == self.numbers[-1] + 1
        self.numbers.append(step.number)
        if step.is_last:
            self.ends.append(step.number)
        keys = list(zip(request.batch_slots.tolist(), request.generations.tolist(), strict=True))
        batch_rows = [None if key[0] < 0 else key for key in keys[: step.num_batch_rows]]
        self.num_named.append(int(request.block_starts[step.num_batch_rows]))
        self._learn_prompts(request, step, keys)
        self.num_begins += step.begins
        if step.begins:
            for batch_row, key in enumerate(batch_rows):
                length = int(request.lengths[batch_row])
                if key is None or key not in self.tokens:
                    continue
                # Steps that the verifier's host has not read yet may have sent more.
                known = len(self.tokens[key])
                assert known >= length if key in self._keys else known == length
                size = self._block_size
                self.blocks[key] = self.blocks[key][: -(-length // size)]
            self._keys = batch_rows
        assert self._keys == batch_rows
        for row, key in enumerate(batch_rows):
            if key is None or key not in self.tokens:
                # Its request wants no drafts.
                assert request.block_starts[row] == request.block_starts[row + 1], "blocks without tokens"
                assert request.max_nodes[row] == 1, "a tree after tokens that were never sent"
                continue
            count, first = int(memory.counts[row]), row * memory.layout.tokens
            hidden = memory.hidden[first : first + count].float().cpu().numpy()
            self._append(key, memory.new_tokens[row, :count].tolist(), hidden)
            self.blocks[key] += request.block_ids[slice(*request.block_starts[row : row + 2])].tolist()
            if count:
                assert int(memory.lengths[row]) == len(self.tokens[key])
            if int(memory.num_left[row]):
                assert len(self.blocks[key]) * self._block_size >= len(self.tokens[key])

    def _learn_prompts(self, request: DraftRequest, step: DeviceStep, keys: list[tuple[int, int]]) -> None:
        at = step.prompt_start
        rows = range(step.num_batch_rows, request.num_rows)
        if sum(int(request.device_hidden[row]) for row in rows):
            assert (step.number, at) != (self._prompts_at[0] + 1, self._prompts_at[1]), (
                "the drafter still reads this half"
            )
            self._prompts_at = step.number, at
        for row in rows:
            new = request.new_tokens[slice(*request.new_token_starts[row : row + 2])].tolist()
            count = int(request.device_hidden[row])
            hidden = self.overlap_memory.prompt_hidden[at : at + count].float().cpu().numpy()
            at += count
            self._append(keys[row], new, hidden)
            assert len(self.tokens[keys[row]]) == request.lengths[row], "a token was sent twice, or never"
            self.num_prompt_rows += 1
            blocks = request.block_ids[slice(*request.block_starts[row : row + 2])].tolist()
            known = self.blocks.setdefault(keys[row], [])
            known[(len(self.tokens[keys[row]]) - len(new)) // self._block_size :] = blocks

    def _append(self, key: tuple[int, int], new: list[int], hidden: np.ndarray) -> None:
        if key not in self.tokens:
            self._forget_earlier(key)
        tokens = self.tokens.setdefault(key, [])
        self.num_without_hidden[key] = self.num_without_hidden.get(key, 0) + len(new) - len(hidden)
        tokens += new
        text = self._text(tokens)
        assert tokens == self._texts[text][: len(tokens)], "was sent other tokens than the text's"
        for position, row in enumerate(hidden, start=len(tokens) - len(hidden) - 1):
            known = self.hidden.setdefault((text, position), row.copy())
            message = f"another hidden state at position {position}"
            np.testing.assert_allclose(row, known, rtol=0, atol=self._tolerance, err_msg=message)

    def _forget_earlier(self, key: tuple[int, int]) -> None:
        """Forget the batch slot's last owner, as a drafter does if a row has another generation."""
        for other in [other for other in self.tokens if other[0] == key[0]]:
            assert other[1] < key[1], "a row of a batch slot's earlier owner"
            self.forgotten.append(other)
            del self.tokens[other], self.blocks[other]

    def _text(self, tokens: list[int]) -> int:
        return next(i for i, text in enumerate(self._texts) if text[: len(tokens)] == tokens)

    def _tree(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return two right tokens and a wrong third, and a wrong first child with a child."""
        text = self._texts[self._text(tokens)]
        coming = [*text[len(tokens) : len(tokens) + 3], 1, 1, 1][:3]
        wrong = (coming[0] + 1) % 20
        return [tokens[-1], wrong, coming[0], 2, coming[1], (coming[2] + 1) % 20], [-1, 0, 0, 1, 2, 4]

    def _put(self, row: int, tree: tuple[list[int], list[int]], most: int) -> None:
        memory, size = self.overlap_memory, min(len(tree[0]), max(most, 1))
        memory.num_nodes[row] = size
        memory.draft_tokens[row, :size] = torch.tensor(tree[0][:size], dtype=torch.int32)
        memory.draft_parents[row, :size] = torch.tensor(tree[1][:size], dtype=torch.int32)


class _Attachment:
    """The transport of one attachment, with its memory."""

    def __init__(self, oracle: OracleDrafter) -> None:
        self._oracle = oracle
        self.overlap_memory = oracle.overlap_memory
        self.order = StreamOrder()

    def is_open(self) -> bool:
        return self._oracle.transport is self

    def is_idle(self) -> bool:
        return self._oracle.is_idle

    def release(self, batch_slots: Sequence[int]) -> None:
        self._oracle.release(batch_slots)

    def receive(self, timeout_s: float) -> DraftBatch | None:
        return self._oracle.answer()

    def post(self, request: DraftRequest) -> None:
        if not self.is_open():
            raise TransportClosedError("closed")
        self._oracle.post(request)

    def post_unawaited(self, request: DraftRequest) -> None:
        self.post(request)

    def begin_unawaited(self, least: int = 0) -> None:
        return
