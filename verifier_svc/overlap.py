"""Run overlapped steps: the host launches a step before it has read the last one.

Sequences join and end while steps are in flight. Each turn of the loop

1. handles messages, starts waiting sequences, and chooses the shape of the trees;
2. requests the trees that follow the step in flight;
3. launches a prefill pass, if there are prompts, and the next step, for whose trees the GPU waits;
4. waits for the step in flight, reads it, commits its tokens and publishes them;
5. binds late what the next step needs of these tokens: masks of grammars and of token lists.

A step with masks is launched in two halves: rows and the target's pass in 3, sampling and all after
it in 5. The masks are computed while the pass runs. No other step has anything to bind.

A run ends, once the steps in flight are read, when something needs the host between two steps
(logprobs of a prompt, a look-up drafter), a drafter attaches or detaches, blocks run out, or nothing
is left to do.

A sequence's blocks go to others as soon as the host has read its end, although steps are in flight,
because those steps do not write to them:

- Step n, which ends a sequence, sets num_left = 0 (advance_seats) after the target's pass and
  before kv_commit. The host reads step n, and so frees the blocks, after all of that.
- Step n + 1 may be launched by then. Its lay_out_rows finds num_left = 0 and gives the seat no rows,
  so it writes and reads no KV entry, has no accepted nodes to move, and no tokens for a drafter.
- If the host ends a sequence (an abort, a deadline), steps in flight may still write to its blocks.
  A new owner's passes are launched later, so they write after that, and nobody reads between.
- The same holds for the drafter's cache, which uses the same block ids: its passes for a new owner
  follow in its stream. It does no harm if the drafter's host hears of the new owner first
  (DraftRows.advance).
- Nobody writes to a block whose content the prefix cache can find.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foretoken.models.device_batch import seq_bucket
from foretoken.resident import ResidentMemory, StreamOrder
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import Shape
from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.lifecycle import Lifecycle
from verifier_svc.sampling.allowed_tokens import ENDED
from verifier_svc.scheduling.batch import Scheduled, build_batch
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT, Seat
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
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
# Seconds that a step may take longer for each prompt token of its prefill pass.
_TOKEN_S = 1e-3
# Steps of a run whose times say nothing of later ones.
_UNTIMED_STEPS = 2


class Messages(Protocol):
    """The engine's side of a run."""

    def handle_messages(self) -> None:
        """Handle messages, and end overdue sequences."""
        ...

    @property
    def is_stopping(self) -> bool: ...


class _Facts(NamedTuple):
    """What was known of a step when it was launched. ``kind``: of its draft."""

    shape: Shape
    num_rows: int
    num_seats: int
    num_prompt_rows: int
    is_timed: bool
    kind: Hashable


class RunAhead:
    """Start runs of overlapped steps. Only the engine thread uses it.

    Args:
        make_step: makes the step for a drafter's memory and stream order.
        plain: the step of runs without a drafter.
        timeout_s: the shortest time that a step waits for its draft before it goes on without.
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
        # The step of each drafter's memory, by drafter number, and the deadlines of its drafts.
        # While attached, step numbers only grow.
        self._drafted: dict[int, tuple[ResidentStep, StepDeadlines]] = {}
        # The captures that are left to do, by step.
        self._captures: dict[ResidentStep, Iterator[None]] = {}

    def run(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        lifecycle: Lifecycle,
        messages: Messages,
        *,
        has_asked: bool,
    ) -> OverlapBlock | None:
        """Run overlapped steps as long as possible.

        Returns the reason if an ordinary step must come first, else None.

        ``has_asked``: whether the last step was an ordinary one, which asked the look-up drafters.
        """
        self._forget_memory(speculator.drafters)
        drafting = speculator.overlap.drafting(scheduler.running, scheduler.admissible, has_asked=has_asked)
        if isinstance(drafting, OverlapBlock):
            return drafting
        step, deadlines = self._step_of(drafting)
        return OverlappedRun(step, drafting, scheduler, speculator, lifecycle, deadlines).run(messages)

    def prepare(self, speculator: Speculator) -> bool:
        """Capture one more graph of a usual size. Return whether there may be more to do.

        Called while no sequence runs.
        """
        self._forget_memory(speculator.drafters)
        steps: dict[ResidentStep, tuple[tuple[int, ...], list[int]]] = {self._plain: ((), [1])}
        for drafter in speculator.drafters:
            attachment = drafter.attachment
            if attachment is not None and attachment.has_resident and attachment.has_answered():
                widths = sorted({shape.nodes for shape in speculator.overlap.controllers.of(drafter).controller.shapes})
                steps[self._step_for(drafter, attachment)[0]] = attachment.needs.features, widths
        for step, (features, widths) in steps.items():
            if step not in self._captures:
                self._captures[step] = step.captures(features, widths)
            if next(self._captures[step], self) is not self:
                return True
        return False

    def _step_of(self, drafting: ResidentDrafting) -> tuple[ResidentStep, StepDeadlines]:
        if drafting.drafter is None or drafting.attachment is None:
            return self._plain, StepDeadlines(self._timeout_s)
        return self._step_for(drafting.drafter, drafting.attachment)

    def _step_for(self, drafter: DrafterHandle, attachment: Attachment) -> tuple[ResidentStep, StepDeadlines]:
        memory = attachment.transport.resident
        assert memory is not None
        known = self._drafted.get(drafter.number)
        if known is None or known[0].memory is not memory:
            step, deadlines = self._make_step(memory, attachment.transport.order), StepDeadlines(self._timeout_s)
            known = self._drafted[drafter.number] = step, deadlines
            known[0].warm_up(attachment.needs.features)
        return known

    def _forget_memory(self, drafters: Items[DrafterHandle]) -> None:
        """Drop the steps of drafters that detached, or attached again with other memory."""
        for number, (step, _) in list(self._drafted.items()):
            attachment = drafters[number - 1].attachment
            if attachment is None or attachment.transport.resident is not step.memory:
                del self._drafted[number]
                self._captures.pop(step, None)


class OverlappedRun:
    """One run of overlapped steps. Only the engine thread uses it."""

    def __init__(
        self,
        step: ResidentStep,
        drafting: ResidentDrafting,
        scheduler: Scheduler,
        speculator: Speculator,
        lifecycle: Lifecycle,
        deadlines: StepDeadlines,
    ) -> None:
        self._step, self._drafting, self._deadlines = step, drafting, deadlines
        self._scheduler, self._speculator, self._lifecycle = scheduler, speculator, lifecycle
        # Running sequences that have no seat yet.
        self._joining: list[Sequence] = list(scheduler.running)
        # The trees' shape for which blocks were reserved, and the one in which steps are launched.
        self._reserved_shape = self._launched_shape = drafting.shape
        # The seats of the last launched step, and where the hidden states of its prompts begin.
        self._launched: tuple[Seat | None, ...] | None = None
        self._prompt_start = 0
        self._facts: deque[_Facts] = deque()
        self._num_launched = self._num_read = 0
        # Whether a draft was late or the drafter is gone; whether nobody can go on for want of
        # blocks.
        self._is_lost = self._lacks_blocks = False

    def run(self, messages: Messages) -> OverlapBlock | None:
        """Run until something needs the host between two steps, or nothing is left to do.

        Returns the reason if no step could be launched, else None.
        """
        step, drafting = self._step, self._drafting
        step.begin(drafting.features, max(step.number, drafting.number))
        self._speculator.begin_overlap()
        phase = self._lifecycle.counters.phase
        is_ending = False
        read_at = time.perf_counter()
        while True:
            if not is_ending:
                with phase("plan"):
                    messages.handle_messages()
                    self._free_seats()
                    is_ending = messages.is_stopping or not self._plan()
            is_ending |= not self._bind(read_at)
            if not is_ending and self._has_work():
                is_ending = not self._launch()
            if not step.num_in_flight:
                break
            if is_ending or step.num_in_flight == MAX_IN_FLIGHT or not self._has_work():
                is_ending |= not self._bind(read_at)
                with phase("wait"):
                    is_ending |= not self._await_results(read_at)
                with phase("commit"):
                    read_at = self._read(read_at)
        self._end()
        return OverlapBlock.NO_FREE_BLOCKS if self._lacks_blocks and self._num_launched == 0 else None

    # 1. Plan.

    def _plan(self) -> bool:
        """Start waiting sequences and choose the trees' shape. Return whether the run can go on."""
        policy, scheduler, drafting = self._speculator.overlap, self._scheduler, self._drafting
        if drafting.most_steps is not None and self._num_read >= drafting.most_steps:
            return False
        waiting = scheduler.admissible
        if not all(policy.joins(sequence, drafting) for sequence in waiting):
            return False
        now = time.monotonic()
        for _ in waiting:
            sequence = scheduler.admit(now)
            if sequence is None:
                break
            policy.start(sequence, drafting)
            self._joining.append(sequence)
        if not policy.still_drafts(drafting, scheduler.running, scheduler.admissible):
            return False
        return policy.choose(drafting, max(len(scheduler.running), 1)) and self._reserve()

    def _reserve(self) -> bool:
        """Reserve blocks for one more step of each seat, whatever steps in flight emit."""
        shape = self._drafting.shape
        is_same, self._reserved_shape = shape == self._reserved_shape, shape
        self._lacks_blocks = False
        for seat in self._step.seats:
            if seat is None or (is_same and len(seat.sequence.tokens) <= seat.enough_until):
                continue
            if not self._reserve_seat(seat.sequence):
                self._lacks_blocks = True
                return False
            seat.enough_until = self._enough_until(seat.sequence)
        return True

    def _enough_until(self, sequence: Sequence) -> int:
        """Return up to how many tokens a sequence needs no more blocks, whatever is in flight."""
        width = self._drafting.shape_of(sequence).nodes
        if self._scheduler.has_reserved(sequence, sequence.max_len + width + 1):
            return sequence.max_len
        num_slots = len(sequence.block_ids) * self._scheduler.blocks.block_size
        return num_slots - MAX_IN_FLIGHT * self._step.max_tokens - width - 1

    def _reserve_seat(self, sequence: Sequence) -> bool:
        # One KV slot more, because a drafter stores the next root's KV entry before the target
        # does.
        width = self._drafting.shape_of(sequence).nodes
        most = sequence.max_len + width + 1
        least = min(len(sequence.tokens) + self._step.num_in_flight * self._step.max_tokens + width + 1, most)
        if self._scheduler.has_reserved(sequence, least):
            return True
        return self._scheduler.reserve_ahead(sequence, least, min(least + _PAGES_AHEAD, most))

    def _has_work(self) -> bool:
        """Return whether a prompt waits, or a seat may emit more than steps in flight do."""
        num_in_flight = self._step.num_in_flight
        return bool(self._joining) or any(
            seat is not None and seat.sequence.max_new_tokens > num_in_flight for seat in self._step.seats
        )

    # 2 and 3. Launch.

    def _launch(self) -> bool:
        """Request the trees after the last step, then launch prompts and the next step.

        Returns whether there was anything to launch.
        """
        step, drafting = self._step, self._drafting
        is_drafted = drafting.drafter is not None and self._launched is not None
        kind = drafting.shape, seq_bucket(len(self._launched or ())), drafting.has_prompts
        phase = self._lifecycle.counters.phase
        if self._launched is not None:
            with phase("draft_post"):
                drafting.post(step.number, self._launched, self._prompt_start)
        with phase("prefill"):
            num_prompt_rows = self._prefill()
        self._join()
        if drafting.shape != self._launched_shape:
            self._launched_shape = drafting.shape
            for index, seat in enumerate(step.seats):
                if seat is not None:
                    step.resize(index, drafting.shape_of(seat.sequence).nodes)
        self._launched = tuple(step.seats)
        taken = [seat for seat in self._launched if seat is not None]
        if not taken and not num_prompt_rows:
            self._lacks_blocks = True
            return False
        self._num_launched += 1
        self._facts.append(
            _Facts(
                drafting.shape,
                sum(seat.width for seat in taken),
                len(taken),
                num_prompt_rows,
                self._num_launched > _UNTIMED_STEPS and (drafting.drafter is None or drafting.is_for_all),
                kind,
            )
        )
        with phase("launch"):
            step.launch(is_drafted=is_drafted)
        return True

    def _prefill(self) -> int:
        """Launch a pass over the next prompt tokens, all but each prompt's last. Return its rows."""
        drafting, capture = self._drafting, self._speculator.hidden_states
        if not self._joining:
            return 0
        num_seats = sum(seat is not None for seat in self._step.seats)
        room = self._scheduler.prefill.tokens(self._step_s(drafting.shape, num_seats))
        parts: list[Scheduled] = []
        for sequence in self._joining:
            part = Scheduled(sequence, min(sequence.num_uncomputed - 1, room), 1)
            if sequence.num_computed and drafting.is_new_to_drafter(sequence):
                # A drafter needs the hidden states at the end of a cached prefix.
                part.num_rerun = capture.num_rerun(sequence)
            part.num_tokens = min(part.num_tokens, room - part.num_rerun)
            end = sequence.num_computed + part.num_tokens
            # The drafter is sent one token more than is computed, with its block.
            if part.num_tokens < 0 or not self._scheduler.reserve_ahead(sequence, end + 1, end + 1):
                continue
            if not drafting.reserve_room(sequence, end):
                continue
            if part.num_rows:
                parts.append(part)
                room -= part.num_rows
            elif drafting.is_for(sequence):
                drafting.send_prompt(sequence, 0)
        if not parts:
            return 0
        blocks = self._lifecycle.blocks
        batch = build_batch(parts, blocks.block_size, blocks.num_blocks * blocks.block_size)
        self._step.prefill(batch.forward)
        sent = []
        for part, first_row in zip(parts, batch.row_starts, strict=True):
            self._lifecycle.advance(part.sequence, part.num_tokens)
            if drafting.send_prompt(part.sequence, part.num_rows):
                sent.append((first_row, part.num_rows))
        self._prompt_start = self._step.keep_hidden(sent)
        return batch.forward.num_rows

    def _step_s(self, shape: Shape, num_seats: int) -> float:
        """Return the seconds that a step should take without prompts; 0 without seats."""
        if not num_seats:
            return 0.0
        if self._drafting.controller is None:
            return self._speculator.costs.plain_step_s(num_seats)
        return self._drafting.controller.controller.step_s(shape, num_seats)

    def _join(self) -> None:
        """Seat the sequences of which all but the last token is computed, and all is sent."""
        waiting: list[Sequence] = []
        for sequence in self._joining:
            is_ready = sequence.num_uncomputed == 1 and self._drafting.has_sent(sequence)
            if not is_ready or not self._reserve_seat(sequence):
                waiting.append(sequence)
                continue
            width = self._drafting.shape_of(sequence).nodes
            seat = Seat(sequence, width, self._drafting.drafter_number, is_new=not sequence.is_decoding)
            self._step.join(self._step.free_seat(), seat)
        self._joining = waiting

    # 4. Bind late.

    def _bind(self, since: float) -> bool:
        """Send the masks of a step that was launched without them, once the step before was read.

        They depend on that step's tokens, and on the drafted trees. Returns False if the step had
        to go on without its trees. ``since``: when the step before was read.
        """
        step, phase = self._step, self._lifecycle.counters.phase
        if step.is_bound or step.num_in_flight > 1:
            return True
        with phase("wait"):
            is_alive = self._await(step.has_trees, since)
        with phase("bind"):
            step.bind(
                {
                    index: ENDED if seat.is_left else seat.sequence.sampler.tree_masks(tokens, parents)
                    for index, (seat, tokens, parents) in step.trees().items()
                }
            )
        return is_alive

    # 5. Wait and read.

    def _await_results(self, since: float) -> bool:
        """Wait until the oldest step is done. Arguments and result as for ``_await``."""
        is_alive = self._await(self._step.is_done, since)
        # The first step of a run waits for no draft.
        if is_alive and self._num_read:
            self._deadlines.observe(self._facts[0].kind, time.perf_counter() - since)
        return is_alive

    def _await(self, is_there: Callable[[], bool], since: float) -> bool:
        """Wait for something of the oldest step. Return False if it had to go on without its trees.

        ``since``: when the step before was read.
        """
        facts = self._facts[0]
        timeout_s = self._deadlines.seconds(facts.kind)
        deadline = since + timeout_s + _TOKEN_S * sum(each.num_prompt_rows for each in self._facts)
        while not is_there():
            if self._drafting.drafter is not None and (self._is_lost or not self._is_alive(deadline, facts.kind)):
                # Repeat it: a drafter that resumes late may overwrite the release.
                self._step.release()
                self._is_lost = True
            time.sleep(_POLL_S)
        return not self._is_lost

    def _is_alive(self, deadline: float, kind: Hashable) -> bool:
        drafting = self._drafting
        assert drafting.drafter is not None and drafting.attachment is not None
        if not drafting.is_open:
            return False
        if time.perf_counter() < deadline:
            return True
        drafting.attachment.leave_alone()
        if not self._deadlines.is_excused(kind):
            timeout_s = self._deadlines.seconds(kind)
            drafting.drafter.source.report_failure(f"no draft within {timeout_s * 1e3:.0f} ms")
        return False

    def _read(self, read_at: float) -> float:
        """Commit the oldest step's tokens and publish them. Return when that was done."""
        drafting, lifecycle, facts = self._drafting, self._lifecycle, self._facts.popleft()
        self._num_read += 1
        num_live = 0
        why_none = partial(self._speculator.fallbacks.of_overlapped, drafting=drafting, shape=facts.shape)
        why_first = partial(why_none, is_first=True)
        for seat, walk, num_nodes in self._step.receive():
            num_live += num_nodes > 0
            if num_nodes == 0 or seat.is_left:
                continue
            shares = drafting.observe(seat.sequence, num_nodes, len(walk.matched_nodes), len(walk.tokens))
            if seat.is_new:
                seat.is_new = False
                lifecycle.append(seat.sequence, 1, walk)
            else:
                lifecycle.commit_decode(seat.sequence, walk, shares, why_none if seat.has_stepped else why_first)
            seat.has_stepped = True
        drafting.learn(facts.shape)
        now = time.perf_counter()
        is_timed = facts.is_timed and facts.num_seats > 0
        lifecycle.end_step(
            facts.num_rows,
            now - read_at,
            is_plain=is_timed and drafting.drafter is None and not facts.num_prompt_rows,
        )
        if facts.num_prompt_rows and self._num_read > _UNTIMED_STEPS:
            step_s = self._step_s(facts.shape, facts.num_seats)
            self._scheduler.prefill.observe(facts.num_prompt_rows, now - read_at, step_s)
        if is_timed and drafting.controller is not None:
            drafting.controller.controller.observe_step(
                facts.shape, facts.num_seats, now - read_at, num_prompt_tokens=facts.num_prompt_rows
            )
        self._speculator.limit.count(num_live)
        return now

    def _free_seats(self) -> None:
        """Free the seats of sequences that have ended, and forget those that wait for one."""
        for index, seat in enumerate(self._step.seats):
            if seat is not None and seat.is_left:
                self._step.leave(index)
                self._drafting.drop(seat.sequence)
        for sequence in [sequence for sequence in self._joining if sequence.table is None]:
            self._joining.remove(sequence)
            self._drafting.drop(sequence)

    def _end(self) -> None:
        drafting, running = self._drafting, self._scheduler.running
        drafting.end(self._step.number, self._launched or (), self._prompt_start)
        for sequence in running:
            # The hidden states of these steps were never copied to the host.
            sequence.hidden_states.clear()
        self._speculator.end_overlap(self._num_read, [s for s in running if s.is_decoding])
