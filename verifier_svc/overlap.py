"""Overlap steps of steady decode with the host's work: decide when a run starts and ends.

A run of overlapped steps (ResidentStep) takes place between two ordinary steps of the engine. Every
sequence must be in plain decode, or draft with one and the same model on this GPU. The host
launches step n + 1, requests the trees that follow it, and then reads the results of step n. The
run ends, once the steps in flight are read, if anything else needs the engine: a message, a
deadline, a missing block, a drafter that attached or detached, or a waiting sequence that could
start. The last trees of the run are for the engine's next ordinary step.

A sequence that ends by itself leaves its seat. The run goes on without it as long as a pass over a
smaller batch would cost about as much. Other seats may get its blocks at once, although steps are
in flight, because none of those steps writes to them:

- Within a run only the device ends sequences. Step n, which ends one, sets num_left = 0
  (advance_seats) after the target's pass and before kv_commit. The host reads step n, and so frees
  the blocks, after all of that.
- Step n + 1 may be launched by then. Its lay_out_rows finds num_left = 0 and gives the seat no rows,
  so it writes and reads no KV entry. Its advance_seats leaves no accepted nodes for kv_commit to
  move, and no tokens for a drafter.
- A block's new owner gets it by the block tables of a later step, which follow the steps in the
  stream.
- The drafter's cache uses the same block ids. The draft after step n writes the KV entries of the
  ended sequence's last tokens, maybe after the host has read step n. A later draft in the same
  stream writes the new owner's entries. It does no harm if the drafter's host hears of the new owner
  first (DraftRows.advance).
- Nobody writes to a block whose content the prefix cache can find. A seat gets such a block only
  after its content is forgotten; sequences with the same prefix get it only after the run. Only new
  sequences get batch slots, also after the run.
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

# Seconds between checks whether a step is done. The next one runs meanwhile, so the GPU does not
# wait.
_POLL_S = 50e-6
# Tokens to reserve blocks for in advance, so that block tables change rarely.
_PAGES_AHEAD = 64
# Draft timeouts that a run's first draft may take, because it captures graphs of its shape.
_FIRST_TIMEOUTS = 10
# A run ends if a pass over the remaining batch takes at most this share of its own. That repays the
# end (an empty pipeline, an ordinary step) in about eight steps. If weights bound a pass, no batch
# is that much faster.
_PAYS_FROM = 7 / 8


class Committer(Protocol):
    """The engine's side of a finished step."""

    def commit_decode(self, sequence: Sequence, result: WalkResult, shares: tuple[DrafterShare, ...]) -> None:
        """Append a decode step's tokens, emit their event, and end the sequence if it is done."""
        ...

    def end_step(self, num_rows: int, seconds: float, *, is_plain: bool) -> None:
        """Record a finished step, ``seconds`` after the one before, and publish its events."""
        ...


class RunAhead:
    """Run overlapped steps. Only the engine thread uses it.

    Args:
        make_step: makes the step for a drafter's memory and stream order.
        plain: the step of runs without a drafter.
        timeout_s: most seconds that a step waits for its draft before it goes on without.
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
        # The step of each drafter's memory, by drafter number. While attached, step numbers only
        # grow.
        self._drafted: dict[int, ResidentStep] = {}

    def run(
        self, scheduler: Scheduler, speculator: Speculator, committer: Committer, may_go_on: Callable[[], bool]
    ) -> OverlapBlock | None:
        """Run steps until ``may_go_on`` is false or anything else ends the run.

        Returns the reason if sequences run and no run could start, else None.
        """
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
                # The host sent the first step's trees. The second step waits for the run's first
                # draft.
                timeout_s = self._timeout_s * (_FIRST_TIMEOUTS if num_read < MAX_IN_FLIGHT else 1)
                is_ending = not self._await(step, drafting, read_at + timeout_s) or is_ending
                num_read += 1
                _commit(step.receive(), seats, drafting, committer)
                now = time.perf_counter()
                # The rows of the pass, which still has room for seats that were left.
                num_rows = sum(seat.width for seat in seats)
                committer.end_step(num_rows, now - read_at, is_plain=drafting.drafter is None)
                speculator.limit.count(len(scheduler.running))
                read_at = now
        for sequence in scheduler.running:
            # The hidden states of these steps were never copied to the host.
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
        """Drop the steps of drafters that detached, or attached again with other memory."""
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
        """Wait until the oldest step is done. Return False if it had to go on without its trees."""
        is_released = False
        while not step.is_done():
            if drafting.drafter is not None and (is_released or not self._is_alive(drafting, deadline)):
                # Repeat it: a drafter that resumes late may overwrite the release.
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
    """Return whether all work is decode steps with no host work between two of them."""
    return (
        bool(scheduler.running)
        and not scheduler.can_admit
        and all(
            s.is_decoding and s.sampling.grammar is None and s.sampling.logprobs is None and not s.wants_prompt_logprobs
            for s in scheduler.running
        )
    )


def _is_large_enough(seats: list[Seat], costs: DraftCosts) -> bool:
    """Return whether a pass without the left seats would cost about as much as with them."""
    rows, whole = (bucket(sum(seat.width for seat in some)) for some in ([s for s in seats if not s.is_left], seats))
    return rows == whole or costs.plain_step_s(rows) > _PAYS_FROM * costs.plain_step_s(whole)


def _reserve(scheduler: Scheduler, seats: list[Seat], num_in_flight: int, max_tokens: int) -> bool:
    """Reserve blocks for one more step, whatever steps in flight emit. Return whether it worked."""
    for seat in seats:
        sequence = seat.sequence
        if seat.is_left:
            continue
        # One KV slot more, because a drafter stores the next root's KV entry before the target
        # does.
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
