"""Overlapped steps over a HashTarget: the host does verifier_svc.overlap_step's work at once.

Tests can drive runs through thousands of steps, and everything around a step is real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch
from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder
from foretoken.results import FinishReason
from foretoken.tree import DraftTree, depths
from tests.support.given_masks import give
from tests.support.hash_target import HashTarget
from verifier_svc.joined_prompts import WaitingPrompts
from verifier_svc.sampling.allowed_tokens import ENDED, TreeMasks
from verifier_svc.sampling.verify import SamplingState, WalkResult, followed
from verifier_svc.sampling.walker import Walk, walk_on_host
from verifier_svc.scheduling.batch import Scheduled, StepBatch, build_batch, commit_slots
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT, Seat, SeatResult, SeatTree
from verifier_svc.scheduling.sequence import Sequence as Running

NOTHING = WalkResult([], [], [], None, None, [], 0, [])


@dataclass
class _Half:
    """A launched step whose tokens are not sampled yet. ``seats``: when it was launched."""

    seats: list[Seat | None]
    parts: list[Scheduled | None]
    batch: StepBatch | None
    logits: torch.Tensor
    found: Mapping[int, Draft]


class HostStep:  # large: the interface of ResidentStep, and what tests read
    """The part of ResidentStep that RunAhead uses. Results are there at once, but read a step late.

    ``on_launch``: called with each step's number before it is made. ``is_stuck``: whether the
    oldest step in flight, by its number, still waits for its trees, ``num_releases`` releases after
    the first.
    """

    def __init__(
        self,
        target: HashTarget,
        memory: ResidentMemory,
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
        # Sizes of the prefill passes, and the seats of each step.
        self.prefills: list[int] = []
        self.num_seated: list[int] = []
        self.num_bound = 0
        # Trees of each step that came from the host.
        self.num_found: list[int] = []
        self._unread: list[list[SeatResult]] = []
        self._half: _Half | None = None
        self._waiting: WaitingPrompts | None = None
        self.seats: list[Seat | None] = []
        # The sequences as the last launched step left them; None for one that has ended.
        self._ahead: list[Running | None] = []
        self._joined_at: list[int] = []
        self._features: tuple[int, ...] = ()
        self._budget = 0
        # The most nodes of each seat in the step that is launched.
        self._widths: list[int] = []

    @property
    def has_waiting(self) -> bool:
        """Whether prompts wait for the next step."""
        return self._waiting is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._unread)

    @property
    def max_tokens(self) -> int:
        return self.memory.layout.tokens

    @property
    def seating(self) -> HostStep:
        """Keep its own seats."""
        return self

    def warm_up(self, features: tuple[int, ...]) -> None:
        return

    def begin(self, features: tuple[int, ...], number: int) -> None:
        assert not self._unread and self._waiting is None
        self.number, self._features = number, features
        self.num_runs += 1
        seats = self.memory.layout.seats
        self.seats, self._ahead, self._joined_at = [None] * seats, [None] * seats, [0] * seats

    def free_seat(self) -> int:
        return self.seats.index(None)

    def join(self, index: int, seat: Seat) -> None:
        assert self.seats[index] is None
        sequence = copy.copy(seat.sequence)
        sequence.tokens = list(sequence.tokens)
        assert sequence.num_uncomputed == 1
        if seat.is_masked:
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
        self.seats[index], self._ahead[index], self._joined_at[index] = seat, sequence, self.number

    def leave(self, index: int) -> None:
        self.seats[index] = self._ahead[index] = None

    def resize(self, index: int, width: int) -> None:
        seat = self.seats[index]
        assert seat is not None
        seat.width = width

    def share_rows(self, budget: int) -> None:
        self._budget = budget

    def num_rows(self, seat: Seat) -> int:
        return min(seat.width, self._budget) if self._budget else seat.width

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
        self._target.forward(prompts.batch, self._features)
        at = prompts.hidden_row
        for start, count in prompts.parts if self._features else ():
            rows = torch.from_numpy(self._target.feature_rows(list(range(start, start + count))))
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
        parts = [self._part(index, is_drafted, found.get(index)) for index in range(len(self.seats))]
        self.num_seated.append(sum(seat is not None for seat in self.seats))
        live = [part for part in parts if part is not None]
        batch, logits = None, torch.zeros(0)
        self.number += 1
        if live:
            batch = build_batch(live, self._block_size, self._scratch)
            logits = self._target.forward(batch.forward, self._features)
        self._half = _Half(list(self.seats), parts, batch, logits, found)
        self._unread.append([])
        self.most_in_flight = max(self.most_in_flight, len(self._unread))
        if not any(seat is not None and seat.is_masked for seat in self.seats):
            self._conclude({})
        return has_joined

    @property
    def is_bound(self) -> bool:
        return self._half is None

    def has_trees(self) -> bool:
        return not self._is_stuck(self.number, self._num_releases)

    def trees(self) -> dict[int, SeatTree]:
        assert self._half is not None
        found = {}
        for index, (seat, part) in enumerate(zip(self._half.seats, self._half.parts, strict=True)):
            if seat is not None and part is not None and seat.is_masked:
                tree = part.tree or DraftTree.root_only(part.sequence.tokens[-1])
                found[index] = SeatTree(seat, tree.tokens, tree.parents)
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

    def receive(self) -> list[SeatResult]:
        return [
            result._replace(walk=followed(result.seat.sequence.sampler, result.walk))
            if result.seat.is_masked and result.num_nodes and not result.seat.is_left
            else result
            for result in self._unread.pop(0)
        ]

    def _shared_widths(self, found: Mapping[int, Draft]) -> list[int]:
        """Return each seat's most nodes; of shared rows, the nodes of the best scores get them."""
        most = [0 if seat is None else seat.width for seat in self.seats]
        seats = {index: seat for index, seat in enumerate(self.seats) if seat is not None and index not in found}
        places = sorted(
            (-float(self.memory.draft_scores[index, node]), index) for index in seats for node in range(1, most[index])
        )
        quota = sum(self.num_rows(seat) for seat in seats.values()) - len(seats)
        for _, index in places[quota:]:
            most[index] -= 1
        return most

    def _part(self, index: int, is_drafted: bool, found: Draft | None) -> Scheduled | None:
        sequence, seat = self._ahead[index], self.seats[index]
        if sequence is None:
            return None
        assert sequence.table is not None and seat is not None and seat.sequence.table is not None
        known = seat.sequence.block_ids
        tree = self._tree(index, sequence) if is_drafted and self.number > self._joined_at[index] else None
        part = Scheduled(sequence, 1, seat.width)
        if found is not None:
            assert seat.sequence.tokens == sequence.tokens, "a tree that does not follow the last step"
            assert 1 < found.tree.num_nodes <= min(sequence.max_new_tokens, self.memory.layout.nodes)
            assert int(depths(found.tree.parents).max()) < self.max_tokens
            part.draft = found
        elif tree is not None and tree.num_nodes > 1:
            number = tree.num_nodes
            part.draft = Draft(tree, [0] + [seat.number] * (number - 1), [0.0] * number, [0.0] * number)
        most = sequence.num_computed + part.num_rows
        assert most <= len(known) * self._block_size, "a step without blocks"
        return part

    def _tree(self, index: int, sequence: Running) -> DraftTree | None:
        memory, seat = self.memory, self.seats[index]
        assert seat is not None
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
            for index, (part, seat) in enumerate(zip(half.parts, half.seats, strict=True)):
                if part is None or seat is None:
                    continue
                first_row, row_start = next(starts)
                if seat.is_left:
                    # It was ended between the two halves. What it samples is dropped.
                    half.parts[index] = None
                    self._ahead[index] = None
                    continue
                row_starts.append(row_start)
                walks.append(_walk(part, first_row, half.logits, masks.get(index)))
                moved = commit_slots(part.sequence, walks[-1].accepted_nodes, self._block_size)
                self._target.commit(*(np.array(slots, np.int32) for slots in moved))
            if self._features:
                rows = [
                    row_start + node
                    for row_start, walk in zip(row_starts, walks, strict=True)
                    for node in (0, *walk.accepted_nodes)[: len(walk.tokens)]
                ]
                hidden = torch.from_numpy(self._target.feature_rows(rows))
        self._unread[-1] = self._results(half, walks, hidden)
        self._order.signal_step(self.number)

    def _results(self, half: _Half, walks: list[WalkResult], hidden: torch.Tensor) -> list[SeatResult]:
        memory, results = self.memory, []
        left, first = iter(walks), 0
        for index, (part, seat) in enumerate(zip(half.parts, half.seats, strict=True)):
            if part is None or seat is None:
                memory.counts[index] = memory.num_left[index] = 0
                if seat is not None:
                    results.append(SeatResult(seat, NOTHING, 0))
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
            if self._features:
                at = index * memory.layout.tokens
                memory.hidden[at : at + count] = hidden[first : first + count]
                first += count
            # Another may have the seat by now.
            if has_ended and self.seats[index] is seat:
                self._ahead[index] = None
            results.append(SeatResult(seat, walk, num_nodes, half.found.get(index)))
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


def plain_memory(seats: int, nodes: int) -> ResidentMemory:
    layout = ResidentLayout(seats, nodes, nodes, 0, torch.float32)
    return ResidentMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
