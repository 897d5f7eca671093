"""Overlapped steps over a HashTarget: the host does verifier_svc.overlap.step's work at once.

Tests can drive runs through thousands of steps, and everything around a step is real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.results import FinishReason
from foretoken.tree import DraftTree, depths
from tests.support.given_masks import give
from tests.support.hash_target import HashTarget
from verifier_svc.overlap.joined_prompts import WaitingPrompts
from verifier_svc.sampling.allowed_tokens import ENDED, TreeMasks
from verifier_svc.sampling.verify import SamplingState, WalkResult, followed
from verifier_svc.sampling.walker import Walk, walk_on_host
from verifier_svc.scheduling.batch import Scheduled, StepBatch, build_batch, commit_kv_slots
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow, BatchRowResult, BatchRowTree
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence as Running

NOTHING = WalkResult([], [], [], None, None, [], 0, [])


@dataclass
class _Half:
    """A launched step whose tokens are not sampled yet. ``batch_rows``: when it was launched."""

    batch_rows: list[BatchRow | None]
    parts: list[Scheduled | None]
    batch: StepBatch | None
    logits: torch.Tensor
    found: Mapping[int, Draft]


class HostStep:  # large: the interface of OverlappedStep, and what tests read
    """The part of OverlappedStep that OverlapRuns uses. Results are there at once, but read a step
    late.

    ``on_launch``: called with each step's number before it is made. ``is_stuck``: whether the
    oldest step in flight, by its number, still waits for its trees, ``num_releases`` releases after
    the first.
    """

    def __init__(
        self,
        target: HashTarget,
        memory: OverlapMemory,
        order: StreamOrder,
        *,
        block_size: int,
        num_blocks: int,
        on_launch: Callable[[int], None] = lambda number: None,
        is_stuck: Callable[[int, int], bool] = lambda number, num_releases: False,
    ) -> None:
        self._target, self.memory, self._order = target, memory, order
        self._block_size, self._scratch = block_size, num_blocks * block_size
        self._on_launch, self._is_stuck = on_launch, is_stuck
        self.most_in_flight = 0
        # Nothing is captured, so nothing moves.
        self.generation = 0
        self._num_releases = 0
        self.number = 0
        self.num_runs = 0
        # Sizes of the prefill passes, and the number of sequences in each step.
        self.prefills: list[int] = []
        self.num_running: list[int] = []
        self.num_bound = 0
        # Trees of each step that came from the host.
        self.num_found: list[int] = []
        self._unread: list[list[BatchRowResult]] = []
        self._half: _Half | None = None
        self._waiting: WaitingPrompts | None = None
        self.rows: list[BatchRow | None] = []
        # The sequences as the last launched step left them; None for one that has ended.
        self._ahead: list[Running | None] = []
        self._joined_at: list[int] = []
        self._captured_layers: tuple[int, ...] = ()
        self._budget = 0
        # The most nodes of each sequence in the step that is launched.
        self._widths: list[int] = []

    @property
    def has_waiting(self) -> bool:
        """Whether prompts wait for the next step."""
        return self._waiting is not None

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._unread)

    @property
    def max_tokens(self) -> int:
        return self.memory.layout.tokens

    @property
    def in_flight(self) -> HostStep:
        """Return itself: it keeps its own steps in flight."""
        return self

    @property
    def batch_rows(self) -> HostStep:
        """Return itself: it keeps its own batch rows."""
        return self

    def warm_up(self, captured_layers: tuple[int, ...]) -> None:
        return

    def begin(self, captured_layers: tuple[int, ...], number: int) -> None:
        assert not self._unread and self._waiting is None
        self.number, self._captured_layers = number, captured_layers
        self.num_runs += 1
        batch_rows = self.memory.layout.batch_rows
        self.rows, self._ahead, self._joined_at = [None] * batch_rows, [None] * batch_rows, [0] * batch_rows

    def free_row(self) -> int:
        return self.rows.index(None)

    def join(self, index: int, batch_row: BatchRow) -> None:
        assert self.rows[index] is None
        sequence = copy.copy(batch_row.sequence)
        sequence.tokens = list(sequence.tokens)
        assert sequence.num_uncomputed == 1
        if batch_row.is_masked:
            # As on a device: the host alone knows the masks.
            params = replace(sequence.sampling, grammar=None, allowed_token_ids=(), bad_token_ids=())
            split = sequence.num_prompt_tokens
            sequence.sampler = SamplingState(
                params,
                sequence.tokens[:split],
                sequence.tokens[split:],
                eos_ids=sequence.sampler.stop_ids,
                choice_index=sequence.choice_index,
                vocab_limit=sequence.sampler._vocab_limit,
            )
        self.rows[index], self._ahead[index], self._joined_at[index] = batch_row, sequence, self.number

    def leave(self, index: int) -> None:
        self.rows[index] = self._ahead[index] = None

    def resize(self, index: int, width: int) -> None:
        batch_row = self.rows[index]
        assert batch_row is not None
        batch_row.width = width

    def share_rows(self, budget: int) -> None:
        self._budget = budget

    def prefill(self, batch: ForwardBatch, parts: Sequence[tuple[int, int]]) -> int:
        assert not len(batch.logit_rows) and self._waiting is None
        self.prefills.append(batch.num_rows)
        self._waiting = WaitingPrompts(batch, parts, self.memory.layout.prompt_rows * (self.number % 2))
        return self._waiting.hidden_row

    def _run_prompts(self) -> bool:
        """Compute prompts that wait. Return whether there were any."""
        prompts, self._waiting = self._waiting, None
        if prompts is None:
            return False
        self._target.forward(prompts.batch, self._captured_layers)
        at = prompts.hidden_row
        for start, count in prompts.parts if self._captured_layers else ():
            rows = torch.from_numpy(self._target.fetch_hidden_states(list(range(start, start + count))))
            self.memory.prompt_hidden[at : at + count] = rows
            at += count
        return True

    def launch(self, *, is_drafted: bool, found: Mapping[int, Draft]) -> bool:
        assert len(self._unread) < MAX_IN_FLIGHT and self.is_bound
        if is_drafted:
            self._order.await_draft(self.number)
        has_joined = self._run_prompts()
        self._on_launch(self.number + 1)
        self.num_found.append(len(found))
        self._widths = self._shared_widths(found)
        parts = [self._part(index, is_drafted, found.get(index)) for index in range(len(self.rows))]
        self.num_running.append(sum(batch_row is not None for batch_row in self.rows))
        live = [part for part in parts if part is not None]
        batch, logits = None, torch.zeros(0)
        self.number += 1
        if live:
            batch = build_batch(live, self._block_size, self._scratch)
            logits = self._target.forward(batch.forward, self._captured_layers)
        self._half = _Half(list(self.rows), parts, batch, logits, found)
        self._unread.append([])
        self.most_in_flight = max(self.most_in_flight, len(self._unread))
        if not any(batch_row is not None and batch_row.is_masked for batch_row in self.rows):
            self._conclude({})
        return has_joined

    @property
    def is_bound(self) -> bool:
        return self._half is None

    def has_trees(self) -> bool:
        return not self._is_stuck(self.number, self._num_releases)

    def trees(self) -> dict[int, BatchRowTree]:
        assert self._half is not None
        found = {}
        for index, (batch_row, part) in enumerate(zip(self._half.batch_rows, self._half.parts, strict=True)):
            if batch_row is not None and part is not None and batch_row.is_masked:
                tree = part.tree or DraftTree.root_only(part.sequence.tokens[-1])
                found[index] = BatchRowTree(batch_row, tree.tokens, tree.parents)
        return found

    def bind(self, masks: Mapping[int, TreeMasks]) -> None:
        # What it needs of the step before was read.
        assert len(self._unread) == 1
        self.num_bound += 1
        self._conclude(masks)

    def release(self) -> None:
        self._num_releases += 1
        self._order.release_draft(self.number)

    def is_done(self) -> bool:
        return not self._is_stuck(self.number - len(self._unread) + 1, self._num_releases)

    def wait(self) -> None:
        """Do nothing: results are there."""

    def receive(self) -> list[BatchRowResult]:
        return [
            result._replace(walk=followed(result.batch_row.sequence.sampler, result.walk))
            if result.batch_row.is_masked and result.num_nodes and not result.batch_row.is_left
            else result
            for result in self._unread.pop(0)
        ]

    def _shared_widths(self, found: Mapping[int, Draft]) -> list[int]:
        """Return the most nodes of each sequence; of shared rows, the nodes of the best scores get them."""
        most = [0 if batch_row is None else batch_row.width for batch_row in self.rows]
        batch_rows = {
            index: batch_row
            for index, batch_row in enumerate(self.rows)
            if batch_row is not None and index not in found
        }
        places = sorted(
            (-float(self.memory.draft_scores[index, node]), index)
            for index in batch_rows
            for node in range(1, most[index])
        )
        quota = sum(batch_row.num_rows(self._budget) for batch_row in batch_rows.values()) - len(batch_rows)
        for _, index in places[quota:]:
            most[index] -= 1
        return most

    def _part(self, index: int, is_drafted: bool, found: Draft | None) -> Scheduled | None:
        sequence, batch_row = self._ahead[index], self.rows[index]
        if sequence is None:
            return None
        assert sequence.table is not None and batch_row is not None and batch_row.sequence.table is not None
        known = batch_row.sequence.block_ids
        tree = self._tree(index, sequence) if is_drafted and self.number > self._joined_at[index] else None
        part = Scheduled(sequence, 1, batch_row.width)
        if found is not None:
            assert batch_row.sequence.tokens == sequence.tokens, "a tree that does not follow the last step"
            assert 1 < found.tree.num_nodes <= min(sequence.max_new_tokens, self.memory.layout.nodes)
            assert int(depths(found.tree.parents).max()) < self.max_tokens
            part.draft = found
        elif tree is not None and tree.num_nodes > 1:
            number = tree.num_nodes
            part.draft = Draft(tree, [0] + [batch_row.drafter_number] * (number - 1), [0.0] * number, [0.0] * number)
        most = sequence.num_computed + part.num_rows
        assert most <= len(known) * self._block_size, "a step without blocks"
        return part

    def _tree(self, index: int, sequence: Running) -> DraftTree | None:
        memory, batch_row = self.memory, self.rows[index]
        assert batch_row is not None
        if int(memory.draft_stamp) != self.number:
            return None
        count = max(min(int(memory.num_nodes[index]), self._widths[index], sequence.max_new_tokens), 1)
        tokens, parents = memory.draft_tokens[index, :count].numpy().copy(), memory.draft_parents[index, :count]
        tokens[0] = sequence.tokens[-1]
        return DraftTree(tokens, parents.numpy().copy())

    def _conclude(self, masks: Mapping[int, TreeMasks]) -> None:
        """Sample and walk, and leave the results in the memory and for the host."""
        half, self._half = self._half, None
        assert half is not None
        walks: list[WalkResult] = []
        row_starts: list[int] = []
        hidden = torch.zeros(0)
        if half.batch is not None:
            starts = iter(zip(half.batch.logit_starts, half.batch.row_starts, strict=False))
            for index, (part, batch_row) in enumerate(zip(half.parts, half.batch_rows, strict=True)):
                if part is None or batch_row is None:
                    continue
                first_row, row_start = next(starts)
                if batch_row.is_left:
                    # It was ended between the two halves. What it samples is dropped.
                    half.parts[index] = None
                    self._ahead[index] = None
                    continue
                row_starts.append(row_start)
                walks.append(_walk(part, first_row, half.logits, masks.get(index)))
                moved = commit_kv_slots(part.sequence, walks[-1].accepted_nodes, self._block_size)
                self._target.commit(*(np.array(kv_slots, np.int32) for kv_slots in moved))
            if self._captured_layers:
                rows = [
                    row_start + node
                    for row_start, walk in zip(row_starts, walks, strict=True)
                    for node in (0, *walk.accepted_nodes)[: len(walk.tokens)]
                ]
                hidden = torch.from_numpy(self._target.fetch_hidden_states(rows))
        self._unread[-1] = self._results(half, walks, hidden)
        self._order.signal_step(self.number)

    def _results(self, half: _Half, walks: list[WalkResult], hidden: torch.Tensor) -> list[BatchRowResult]:
        memory, results = self.memory, []
        left, first = iter(walks), 0
        for index, (part, batch_row) in enumerate(zip(half.parts, half.batch_rows, strict=True)):
            if part is None or batch_row is None:
                memory.counts[index] = memory.num_left[index] = 0
                if batch_row is not None:
                    results.append(BatchRowResult(batch_row, NOTHING, 0))
                continue
            walk, sequence = next(left), part.sequence
            count = len(walk.tokens)
            num_nodes = part.tree.num_nodes if part.tree is not None else 1
            sequence.tokens.extend(walk.tokens)
            sequence.num_computed += 1 + len(walk.accepted_nodes)
            memory.counts[index], memory.lengths[index] = count, len(sequence.tokens)
            has_ended = walk.finish is not None or walk.error is not None
            memory.num_left[index] = 0 if has_ended else sequence.max_new_tokens
            memory.new_tokens[index, :count] = torch.tensor(walk.tokens, dtype=torch.int32)
            if self._captured_layers:
                at = index * memory.layout.tokens
                memory.hidden[at : at + count] = hidden[first : first + count]
                first += count
            # Another may have the batch row by now.
            if has_ended and self.rows[index] is batch_row:
                self._ahead[index] = None
            results.append(BatchRowResult(batch_row, walk, num_nodes, half.found.get(index)))
        memory.stamp.fill_(self.number)
        return results


def _walk(part: Scheduled, first_row: int, logits: torch.Tensor, masks: TreeMasks | None) -> WalkResult:
    """Walk a part's tree.

    With masks: as a device does, which does not know where they come from.
    """
    sequence = part.sequence
    tree = part.tree or DraftTree.root_only(sequence.tokens[-1])
    if masks is ENDED:
        return NOTHING._replace(finish=FinishReason.STOP)
    if masks is not None:
        tree = give(sequence.sampler, tree, masks)
    sources = part.draft.sources if part.draft is not None else None
    return walk_on_host(Walk(sequence, tree, first_row, sources), logits)


def plain_memory(batch_rows: int, nodes: int) -> OverlapMemory:
    layout = OverlapLayout(batch_rows, nodes, nodes, 0, torch.float32)
    return OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
