"""Sends the same committed tokens to a drafter in ordinary requests and through device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from drafter_svc.device.overlapped_draft import OverlappedDraft
from drafter_svc.model.drafter import ModelDrafter
from foretoken.drafting import DeviceStep, DraftBatch, DraftRequest
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from tests.support.paged_draft import BLOCK, Row, hidden_state, request_of


@dataclass(frozen=True)
class PlaySizes:
    """What a drafter and its memory hold.

    Attributes:
        tokens: committed by a sequence in one step, at most.
        nodes: of a tree.
        batch_rows: sequences of a step.
        prompt_rows: hidden states of one prefill pass, at most.
        num_blocks: of the KV cache.
    """

    tokens: int = 3
    nodes: int = 6
    batch_rows: int = 4
    prompt_rows: int = 14
    num_blocks: int = 96


SIZES = PlaySizes()

# Tokens, parents and scores.
Tree = tuple[list[int], list[int], list[float]]


class RecordingOrder(StreamOrder):
    """One stream, and the calls made in it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def await_step(self, number: int) -> None:
        self.calls.append(("await", number))

    def signal_draft(self, number: int) -> None:
        self.calls.append(("signal", number))

    def release_step(self, number: int) -> None:
        self.calls.append(("release", number))


@dataclass
class Text:
    """A sequence and how it is committed: its prompt, then a number of tokens in each step.

    Attributes:
        left: for each step, how many tokens may follow it; after the last step, many.
        sent: how much of the prompt is sent; the drafter does not see the rest. None: all.
        hidden: how many of the prompt's last tokens come with hidden states; None: all.
    """

    prompt: int
    counts: Sequence[int]
    seed: int
    left: Sequence[int] = ()
    sent: int | None = None
    hidden: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def tokens(self, vocab: int) -> list[int]:
        random = np.random.default_rng(self.seed)
        return [int(token) for token in random.integers(0, vocab, self.prompt + sum(self.counts) + 8)]

    def left_after(self, step: int) -> int:
        return self.left[step] if step < len(self.left) else 99


class Play:
    """A drafter on a device, its memory, and the texts of the moment."""

    def __init__(self, drafter: ModelDrafter, device: str, *, vocab: int, width: int, sizes: PlaySizes = SIZES) -> None:
        self.drafter, self.device, self.vocab, self.width, self.sizes = drafter, device, vocab, width, sizes
        layout = OverlapLayout(sizes.batch_rows, sizes.tokens, sizes.nodes, width, torch.float32, sizes.prompt_rows)
        whole = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.memory = OverlapMemory.over(whole, layout)
        self.order = RecordingOrder()
        drafter.set_overlap_memory(self.memory, self.order)
        passes = drafter._passes
        assert passes is not None
        assert isinstance(passes._overlapped, OverlappedDraft)
        self.overlapped = passes._overlapped
        self._step_id = 0
        self._number = 100
        self._generation = 0

    def begin(self, texts: Sequence[Text], seed: int, batch_slots: Sequence[int] | None = None) -> None:
        """Start new sequences of these texts, in blocks that were not theirs before.

        ``batch_slots``: their batch slots, by default 0, 1, ... A later text is the
        batch slot's next sequence.
        """
        self.drafter.release(range(self.sizes.batch_rows + 2))
        self.texts = texts
        self.all_tokens = [text.tokens(self.vocab) for text in texts]
        self.lengths = [text.prompt for text in texts]
        self.batch_slots = list(range(len(texts)) if batch_slots is None else batch_slots)
        numbers = [self.batch_slots[:i].count(slot) for i, slot in enumerate(self.batch_slots)]
        self.generations = [self._generation + 1 + number for number in numbers]
        self._generation = max(self.generations)
        self.progress = [0] * len(texts)
        ids = np.random.default_rng(seed).permutation(self.sizes.num_blocks).tolist()
        share = self.sizes.num_blocks // (self.sizes.batch_rows + 1)
        self.blocks = [ids[i * share : (i + 1) * share] for i in range(self.sizes.batch_rows + 1)]
        self.named = [-(-text.prompt // BLOCK) for text in texts]

    def row(self, index: int, new: int, **options: Any) -> Row:
        """Return a row with the last ``new`` tokens of a text as it stands."""
        tokens = self.all_tokens[index][: self.lengths[index]]
        shape = {"max_nodes": self.sizes.nodes, "max_depth": 2, "max_branches": 2, "seed": 7 + index, "choice": index}
        fields = shape | self.texts[index].options | options
        names = {"batch_slot": self.batch_slots[index], "generation": self.generations[index], "width": self.width or 1}
        return Row(tokens, new, self.blocks[index], **names, **fields)

    def ask(self, rows: Sequence[Row]) -> list[Tree]:
        self._step_id += 1
        request = request_of(rows, with_hidden=bool(self.width), step_id=self._step_id)
        return trees_of(self.drafter.draft(request))

    def prompts(self) -> list[Tree]:
        rows = []
        for index, text in enumerate(self.texts):
            sent = text.prompt if text.sent is None else text.sent
            self.lengths[index] = sent
            rows.append(self.row(index, sent, hidden=text.hidden))
            self.lengths[index] = text.prompt
        return self.ask(rows)

    def send(self, step: int) -> list[Tree]:
        """Send a step in an ordinary request; a text without new tokens has an empty tree."""
        rows, indices = [], []
        for index, text in enumerate(self.texts):
            if text.counts[step]:
                self.lengths[index] += text.counts[step]
                nodes = max(min(int(text.options.get("max_nodes", self.sizes.nodes)), text.left_after(step)), 1)
                hidden = 0 if text.hidden == 0 else None
                rows.append(self.row(index, text.counts[step], max_nodes=nodes, hidden=hidden))
                indices.append(index)
        found: list[Tree] = [([], [], [])] * len(self.texts)
        for index, tree in zip(indices, self.ask(rows) if rows else [], strict=True):
            found[index] = tree
        return found

    def fill(self, step: int, *, stamp: int | None = None, lengths: Sequence[int] | None = None) -> None:
        """Write the results of the verifier's kernels, and garbage everywhere else."""
        counts = [text.counts[step] for text in self.texts]
        left = [text.left_after(step) for text in self.texts]
        self.commit(range(len(self.texts)), counts, left, stamp=stamp, lengths=lengths)

    def commit(
        self,
        batch_rows: Sequence[int | None],
        counts: Sequence[int],
        left: Sequence[int],
        *,
        stamp: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Write results for the texts in ``batch_rows``; None: the batch row is empty."""
        memory = self.memory
        all_counts = np.zeros(self.sizes.batch_rows, np.int32)
        all_lengths, all_left = (
            np.full(self.sizes.batch_rows, 10**9, np.int32),
            np.full(self.sizes.batch_rows, -5, np.int32),
        )
        tokens = np.full((self.sizes.batch_rows, self.sizes.tokens), 10**9, np.int32)
        hidden = np.full((self.sizes.batch_rows * self.sizes.tokens, self.width), np.nan, np.float32)
        for batch_row, index in enumerate(batch_rows):
            if index is None:
                continue
            count, before = counts[batch_row], self.lengths[index]
            all_counts[batch_row], all_lengths[batch_row], all_left[batch_row] = count, before + count, left[batch_row]
            tokens[batch_row, :count] = self.all_tokens[index][before : before + count]
            for j in range(count if self.width else 0):
                hidden[batch_row * self.sizes.tokens + j] = hidden_state(
                    self.all_tokens[index][: before + j], self.width
                )
            self.lengths[index] += count
        if lengths is not None:
            all_lengths[: len(lengths)] = lengths
        memory.stamp.fill_(self._number if stamp is None else stamp)
        for part, values in (
            (memory.counts, all_counts),
            (memory.lengths, all_lengths),
            (memory.num_left, all_left),
            (memory.new_tokens, tokens),
            (memory.hidden, hidden),
        ):
            part.copy_(torch.from_numpy(values))

    def loop(
        self,
        batch_rows: Sequence[int | None],
        *,
        prompts: Sequence[tuple[int, int, int]] = (),
        begins: bool = True,
        is_last: bool = False,
        lag: Mapping[int, int] | None = None,
        stamp: int | None = None,
    ) -> list[Tree]:
        """Post the next step of the texts in ``batch_rows``; return their trees.

        Args:
            batch_rows: a text's index, or None for an empty batch row.
            prompts: texts, each with the first and the last position of a chunk of its prompt.
            lag: by text, how many tokens the host does not know yet.
            stamp: of the step, if it is another than the expected one.
        """
        request = self.loop_request(batch_rows, prompts=prompts, begins=begins, is_last=is_last, lag=lag)
        step = request.device_step
        assert step is not None
        states = [state for row in self._prompt_rows(prompts) if self.width for state in row.hidden_states()]
        self.memory.prompt_hidden.fill_(torch.nan)
        for at, state in enumerate(states):
            self.memory.prompt_hidden[step.prompt_start + at] = torch.from_numpy(state)
        counts, left = [], []
        for index in batch_rows:
            # A text that has ended stays in its batch row for a while.
            is_running = index is not None and self.progress[index] < len(self.texts[index].counts)
            counts.append(self.texts[index].counts[self.progress[index]] if is_running else 0)
            left.append(self.texts[index].left_after(self.progress[index]) if is_running else 0)
            if index is not None:
                self.progress[index] += 1
        self.commit(batch_rows, counts, left, stamp=stamp)
        reply = self.drafter.draft(request)
        # The verifier may write here again.
        self.memory.prompt_hidden.fill_(torch.nan)
        found = self.in_memory(len(batch_rows))
        assert reply.num_rows == request.num_rows
        assert trees_of(reply)[: len(batch_rows)] == found if is_last else (reply.parents == -1).all()
        return found

    def loop_request(
        self,
        batch_rows: Sequence[int | None],
        *,
        prompts: Sequence[tuple[int, int, int]] = (),
        begins: bool = True,
        is_last: bool = False,
        lag: Mapping[int, int] | None = None,
    ) -> DraftRequest:
        """Return the request that ``loop`` posts."""
        self._number += 1
        self._step_id += 1
        rows, blocks = [], []
        for index in batch_rows:
            if index is None:
                rows.append(Row([], 0, [], batch_slot=-1, generation=0, max_nodes=1, max_depth=1, max_branches=1))
                blocks.append([])
                continue
            row = self.row(index, 0)
            row.tokens = row.tokens[: self.lengths[index] - (lag or {}).get(index, 0)]
            first = -(-len(row.tokens) // BLOCK) if begins else self.named[index]
            self.named[index] = max(-(-(self.lengths[index] + self.sizes.tokens) // BLOCK), first)
            rows.append(row)
            blocks.append(self.blocks[index][first : self.named[index]])
        for row in self._prompt_rows(prompts):
            rows.append(row)
            blocks.append(row.blocks[(len(row.tokens) - row.new) // BLOCK : -(-len(row.tokens) // BLOCK)])
        request = request_of(rows, with_hidden=False, step_id=self._step_id)
        if self.width:
            request.rows["device_hidden"][len(batch_rows) :] = [
                len(row.hidden_states()) for row in rows[len(batch_rows) :]
            ]
        starts = request.starts.copy()
        starts[2] = np.cumsum([0, *map(len, blocks)])
        return replace(
            request,
            starts=starts,
            block_ids=np.array([block for part in blocks for block in part], np.int32),
            device_step=DeviceStep(
                self._number, begins, is_last, len(batch_rows), self.sizes.prompt_rows * (self._number % 2)
            ),
        )

    def _prompt_rows(self, prompts: Sequence[tuple[int, int, int]]) -> list[Row]:
        """Return the rows of prompt chunks, as ordinary requests would send them."""
        rows = []
        for index, low, high in prompts:
            row = self.row(index, high - low, max_nodes=1)
            row.tokens = self.all_tokens[index][:high]
            rows.append(row)
        return rows

    def request(self, step: int, *, begins: bool, is_last: bool) -> DraftRequest:
        """Return the request of the next step, with blocks for all tokens that it may commit."""
        self._number += 1
        self._step_id += 1
        if begins:
            self._sent = list(self.lengths)
            self.named = [-(-length // BLOCK) for length in self.lengths]
        rows, blocks = [], []
        for index in range(len(self.texts)):
            row = self.row(index, 0)
            row.tokens = row.tokens[: self._sent[index]]
            rows.append(row)
            need = -(-(self.lengths[index] + self.sizes.tokens) // BLOCK)
            blocks.append(self.blocks[index][self.named[index] : need])
            self.named[index] = max(need, self.named[index])
        request = request_of(rows, with_hidden=bool(self.width), step_id=self._step_id)
        starts = request.starts.copy()
        starts[2] = np.cumsum([0, *map(len, blocks)])
        return replace(
            request,
            starts=starts,
            block_ids=np.array([block for part in blocks for block in part], np.int32),
            device_step=DeviceStep(self._number, begins, is_last, len(rows)),
        )

    def post(self, step: int, *, begins: bool = False, is_last: bool = False, **fill: Any) -> list[Tree]:
        """Post a step of a run; return its trees as the memory holds them."""
        request = self.request(step, begins=begins, is_last=is_last)
        self.fill(step, **fill)
        reply = self.drafter.draft(request)
        assert (reply.epoch, reply.step_id, reply.num_rows) == (1, self._step_id, len(self.texts))
        found = self.in_memory()
        if is_last:
            assert trees_of(reply) == found
        else:
            assert reply.parents.tolist() == [-1] * len(self.texts)
        return found

    def in_memory(self, count: int | None = None) -> list[Tree]:
        """Return the trees of the first ``count`` batch rows, by default one for each text."""
        memory = self.memory
        assert int(memory.draft_stamp) == self._number
        sizes = memory.num_nodes.tolist()
        parts = (memory.draft_tokens, memory.draft_parents, memory.draft_scores)
        tokens, parents, scores = (part.cpu().tolist() for part in parts)
        count = len(self.texts) if count is None else count
        return [(tokens[i][:n], parents[i][:n], scores[i][:n]) for i, n in enumerate(sizes[:count])]

    def finale(self) -> list[Tree]:
        """Send two final ordinary requests: texts go on, and one begins with the first's blocks."""
        for index in range(len(self.texts)):
            self.lengths[index] += 2
        trees = self.ask([self.row(index, 2) for index in range(len(self.texts))])
        whole = self.lengths[0] // BLOCK * BLOCK
        heir = replace(
            self.row(0, 0), tokens=[*self.all_tokens[0][:whole], 3, 1], batch_slot=self.sizes.batch_rows, hidden=2
        )
        heir.new = whole + 2
        heir.blocks = [*self.blocks[0][: whole // BLOCK], self.blocks[self.sizes.batch_rows][0]]
        return trees + self.ask([heir])


def trees_of(batch: DraftBatch) -> list[Tree]:
    return [
        (batch.tree(row).tokens.tolist(), batch.tree(row).parents.tolist(), batch.row_scores(row).tolist())
        for row in range(batch.num_rows)
    ]


def assert_same(found: Sequence[Tree], expected: Sequence[Tree]) -> None:
    assert [tree[:2] for tree in found] == [tree[:2] for tree in expected]
    for tree, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(tree[2], other[2], rtol=1e-5, atol=1e-5)
