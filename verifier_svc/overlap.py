"""Steady decode without waiting for the host: when the engine's steps may run ahead of it, and what ends that.

Between two ordinary steps of the engine a run of ResidentSteps takes place if every sequence is in plain decode, or
drafts with one and the same model on this GPU. The host launches step n + 1, asks for the trees behind it, and then
reads what step n came to. Whatever wants more than that (a message, a deadline, a page that is not there, a drafter
that came or went, a sequence that waits and could be admitted) ends the run once the steps in flight are read; the last
trees are those of the engine's next ordinary step.

A sequence that ends by itself leaves its seat, and the run goes on without it while the pass of a smaller batch would
cost as much. Its blocks are free for other seats at once, though steps are in flight, since none of them writes there:

- Within a run the device alone ends sequences. Step n, which ends one, leaves num_left = 0 (advance_seats) behind the
  target's pass and ahead of kv_commit, and the host reads step n, so frees blocks, when all of that is done.
- For step n + 1, which may be launched by then, lay_out_rows finds num_left = 0: the seat has no rows, so no entry is
  written or read; advance_seats leaves nothing accepted for kv_commit to move, and no tokens for a drafter.
- Whoever is given a block learns of it by the tables of a later step, and those go the way of the steps, in the stream.
- The drafter's cache has the same block ids. The entries of the ended sequence's last tokens are written by the draft
  behind step n, maybe after the host has read that step; those of a block's new owner by a later draft, in the same
  stream. That the drafter's host learns of the new owner first does no harm (DraftRows.advance).
- A block whose content the prefix cache may find is not written again: it is given to a seat once that is forgotten,
  and to sequences of the same prefix behind the run. Slots are given to new sequences alone, behind the run too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

from foretoken.models.device_batch import bucket
from foretoken.resident import ResidentMemory, StreamOrder
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT, Seat, SeatResult
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.overlap_policy import OverlapBlock
from verifier_svc.speculation.resident_drafting import ResidentDrafting
from verifier_svc.speculation.speculator import Speculator

if TYPE_CHECKING:
    from verifier_svc.overlap_step import ResidentStep

# Between two looks whether a step is done. The next one runs meanwhile, so nothing waits for the host.
_POLL_S = 50e-6
# Tokens that a sequence gets pages for at once, so that tables change rarely.
_PAGES_AHEAD = 64
# Draft timeouts that a run's first draft may take: graphs of its shape are captured.
_FIRST_TIMEOUTS = 10
# A run ends for a smaller batch whose pass takes this part of its own at most: that makes up for the end (an empty
# pipeline, an ordinary step) in some eight steps. Where a pass is bound by its weights, none does.
_PAYS_FROM = 7 / 8


class Committer(Protocol):
    """What the engine does with a step's outcome."""

    def commit_decode(self, sequence: Sequence, result: WalkResult, shares: tuple[DrafterShare, ...]) -> None:
        """Append what a decode step's walk emitted, tell the client, end the sequence if it is done."""
        ...

    def end_step(self, num_rows: int, seconds: float, *, is_plain: bool) -> None:
        """One more step was made, so long after the one before: hand out its events."""
        ...


class RunAhead:
    """Used by the engine's thread alone.

    Args:
        make_step: of the memory and the order that a drafter goes by.
        plain: of runs without a drafter.
        timeout_s: that a step with a draft may take, before it goes on without.
    """

    def __init__(
        self,
        make_step: Callable[[ResidentMemory, StreamOrder], ResidentStep],
        plain: ResidentStep,
        *,
        timeout_s: float,
    ) -> None:
        self._make_step, self._plain = make_step, plain
        self._timeout_s = timeout_s
        # By drafter, the step that goes with its memory: as long as an attachment lasts, numbers only grow.
        self._drafted: dict[int, ResidentStep] = {}

    def run(
        self, scheduler: Scheduler, speculator: Speculator, committer: Committer, may_go_on: Callable[[], bool]
    ) -> OverlapBlock | None:
        """Make steps until ``may_go_on`` or anything else ends the run. Return what prevented it, if sequences run."""
        sequences = list(scheduler.running)
        if not sequences:
            return None
        if not may_go_on():
            return OverlapBlock.DISTURBED
        if not _is_steady(scheduler):
            return OverlapBlock.NOT_STEADY
        self._forget_memory(speculator.drafters)
        drafting = speculator.overlap.drafting(sequences)
        if isinstance(drafting, OverlapBlock):
            return drafting
        step = self._step_of(drafting)
        number = drafting.drafter.number if drafting.drafter is not None else 0
        seats = [Seat(s, drafting.shape(s).nodes, drafting.tree(s), number) for s in sequences]
        if not _reserve(scheduler, seats, 0, step.max_tokens):
            return OverlapBlock.NO_FREE_BLOCKS
        step.begin(seats, drafting.features, drafting.number)
        drafting.begin(sequences)
        self._launch(step, drafting, is_first=True)
        is_ending, num_read = False, 0
        read_at = time.perf_counter()
        while step.num_in_flight:
            is_ending = is_ending or not (
                may_go_on()
                and _is_steady(scheduler)
                and (drafting.most_steps is None or num_read < drafting.most_steps)
                and speculator.overlap.still_drafts(drafting, scheduler.running)
                and _is_large_enough(seats, speculator.costs)
                and _reserve(scheduler, seats, step.num_in_flight, step.max_tokens)
                and all(step.has_room(len(sequence.block_ids)) for sequence in scheduler.running)
            )
            if not is_ending:
                self._launch(step, drafting, is_first=False)
            if is_ending or step.num_in_flight == MAX_IN_FLIGHT:
                # The first step has its trees from the host, the second waits for the run's first draft.
                timeout_s = self._timeout_s * (_FIRST_TIMEOUTS if num_read < MAX_IN_FLIGHT else 1)
                is_ending = not self._await(step, drafting, read_at + timeout_s) or is_ending
                num_read += 1
                _commit(step.receive(), seats, drafting, committer)
                now = time.perf_counter()
                # Those of the pass, which is as large for seats that are left.
                num_rows = sum(seat.width for seat in seats)
                committer.end_step(num_rows, now - read_at, is_plain=drafting.drafter is None)
                speculator.limit.count(len(scheduler.running))
                read_at = now
        for sequence in scheduler.running:
            # What the steps captured has never been on the host.
            sequence.hidden_states.clear()
        speculator.end_overlap(drafting, step.number, num_read, scheduler.running)
        return None

    def _step_of(self, drafting: ResidentDrafting) -> ResidentStep:
        drafter, memory = drafting.drafter, drafting.memory
        if drafter is None or memory is None:
            return self._plain
        step = self._drafted.get(drafter.number)
        if step is None or step.memory is not memory:
            step = self._drafted[drafter.number] = self._make_step(memory, drafting.order)
            step.warm_up(drafting.features)
        return step

    def _forget_memory(self, drafters: Items[DrafterHandle]) -> None:
        """Let go of that of drafters that are not attached as they were."""
        for number, step in list(self._drafted.items()):
            drafter = drafters[number - 1]
            attachment = drafter.attachment
            if attachment is None or attachment.transport.resident is not step.memory:
                del self._drafted[number]

    def _launch(self, step: ResidentStep, drafting: ResidentDrafting, *, is_first: bool) -> None:
        if not is_first:
            drafting.post(step.number, is_last=False)
            step.send_tables()
        step.launch(is_drafted=not is_first and drafting.drafter is not None)

    def _await(self, step: ResidentStep, drafting: ResidentDrafting, deadline: float) -> bool:
        """Until the oldest step is done; False if it had to go on without its trees."""
        is_released = False
        while not step.is_done():
            if drafting.drafter is not None and (is_released or not self._is_alive(drafting, deadline)):
                # Again and again: a drafter that comes back late may take the word of it back.
                step.release()
                is_released = True
            time.sleep(_POLL_S)
        return not is_released

    def _is_alive(self, drafting: ResidentDrafting, deadline: float) -> bool:
        assert drafting.drafter is not None and drafting.attachment is not None
        if not drafting.is_open:
            return False
        if time.perf_counter() < deadline:
            return True
        drafting.attachment.leave_alone()
        drafting.drafter.source.report_failure(f"no draft within {self._timeout_s * 1e3:.0f} ms")
        return False


def _is_steady(scheduler: Scheduler) -> bool:
    """Whether all that is to be done is decode steps without anything that the host must see between two."""
    return (
        bool(scheduler.running)
        and not scheduler.can_admit
        and all(
            s.is_decoding and s.sampling.grammar is None and s.sampling.logprobs is None and not s.wants_prompt_logprobs
            for s in scheduler.running
        )
    )


def _is_large_enough(seats: list[Seat], costs: DraftCosts) -> bool:
    """Whether steps of those that still run would cost about as much without the seats that are left."""
    rows, whole = (bucket(sum(seat.width for seat in some)) for some in ([s for s in seats if not s.is_left], seats))
    return rows == whole or costs.plain_step_s(rows) > _PAYS_FROM * costs.plain_step_s(whole)


def _reserve(scheduler: Scheduler, seats: list[Seat], num_in_flight: int, max_tokens: int) -> bool:
    """Pages for one more step, whatever those in flight come to."""
    for seat in seats:
        sequence = seat.sequence
        if seat.is_left:
            continue
        # One slot more: a drafter keeps an entry for the next root before the target does.
        most = sequence.max_len + seat.width + 1
        least = min(len(sequence.tokens) + num_in_flight * max_tokens + seat.width + 1, most)
        if scheduler.has_reserved(sequence, least):
            continue
        if not scheduler.reserve_ahead(sequence, least, min(least + _PAGES_AHEAD, most)):
            return False
    return True


def _commit(results: list[SeatResult], seats: list[Seat], drafting: ResidentDrafting, committer: Committer) -> None:
    for seat, result in zip(seats, results, strict=True):
        if result.num_nodes:
            walk = result.walk
            shares = drafting.observe(seat.sequence, result.num_nodes, len(walk.matched_nodes), len(walk.tokens))
            committer.commit_decode(seat.sequence, walk, shares)
