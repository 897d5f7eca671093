"""Run overlapped steps: the host launches a step before it has read the last one.

Sequences join and end while steps are in flight. Each turn of the loop

0. lets a part of the running step's time pass: requests that come meanwhile join the next one;
1. handles messages, starts waiting sequences, and chooses the shape of the trees;
2. requests the trees that follow the step in flight;
3. launches the next step, for whose trees the GPU waits. Prompts are part of the target's pass if
   there is a graph with room for them (verifier_svc/joined_prompts.py), else of a pass before it;
4. waits for the step in flight, reads it, commits its tokens and publishes them;
5. binds late what the next step needs of these tokens: masks of grammars and of token lists, and
   look-ups.

A step with masks is launched in two halves: rows and the target's pass in 3, sampling and all after
it in 5. The masks are computed while the pass runs. If a sequence of the next step wants a look-up,
4 comes before that launch, and between them the host only looks up.

A run ends, once the steps in flight are read, when something else needs the host between two steps
(logprobs of a prompt), a drafter attaches or detaches, blocks run out, or nothing is left to do.

A sequence's blocks go to others as soon as the host has read its end, although steps are in flight,
because those steps do not write to them:

- Step n, which ends a sequence, sets num_left = 0 (advance_batch) after the target's pass and
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
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foretoken.models.device_batch import seq_bucket
from verifier_svc.drafters.request import Shape
from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.lifecycle import Lifecycle
from verifier_svc.sampling.allowed_tokens import ENDED
from verifier_svc.scheduling.batch import Scheduled, build_batch
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow
from verifier_svc.scheduling.launch_time import LaunchTime
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.lookups import Compared
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.overlap_policy import OverlapBlock
from verifier_svc.speculation.speculator import Speculator

if TYPE_CHECKING:
    from verifier_svc.overlap_step import ResidentStep

# Seconds between checks whether a step is done. The next one runs meanwhile, so the GPU does not
# wait.
_POLL_S = 50e-6
# Tokens to reserve blocks for in advance, so that block tables change rarely.
_PAGES_AHEAD = 64
# Seconds that a step may take longer for each prompt token that it computes.
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


class _Asked(NamedTuple):
    """The draft that the next step waits for. ``is_drafted``: whether there is one."""

    is_drafted: bool
    kind: Hashable


class _Facts(NamedTuple):
    """What was known of a step when it was launched.

    Attributes:
        num_found_rows: how many of its rows only trees from the host need.
        has_joined: whether the prompt rows were in its own pass.
        kind: of its draft.
        gap_s: seconds that the GPU waited for its launch.
        compared: rows that verify the drafter's tree although a look-up found one.
    """

    shape: Shape
    num_rows: int
    num_found_rows: int
    num_seats: int
    num_prompt_rows: int
    has_joined: bool
    is_timed: bool
    kind: Hashable
    gap_s: float
    compared: Mapping[Sequence, Compared]


class OverlappedRun:  # large: the phases of one loop share its state
    """One run of overlapped steps. Only the engine thread uses it."""

    def __init__(
        self,
        step: ResidentStep,
        drafting: OverlapDrafting,
        scheduler: Scheduler,
        speculator: Speculator,
        lifecycle: Lifecycle,
        deadlines: StepDeadlines,
    ) -> None:
        self._step, self._drafting, self._deadlines = step, drafting, deadlines
        self._scheduler, self._speculator, self._lifecycle = scheduler, speculator, lifecycle
        self._lookups = speculator.begin_overlap(drafting, scheduler.running, step.max_tokens - 1)
        # Running sequences that have no seat yet.
        self._joining: list[Sequence] = list(scheduler.running)
        # The trees' shape for which blocks were reserved, and the one in which steps are launched.
        self._reserved_shape = self._launched_shape = drafting.shape
        # The seats of the last launched step, and where the hidden states of its prompts begin.
        self._launched: tuple[BatchRow | None, ...] | None = None
        self._prompt_start = 0
        self._facts: deque[_Facts] = deque()
        self._num_launched = self._num_read = 0
        # When the last step was done, and when it was read.
        self._done_at = self._read_at = 0.0
        # When the planning of the next step began.
        self._planned_at = 0.0
        self._launch_time = LaunchTime()
        # Whether a draft was late or the drafter is gone; whether nobody can go on for want of
        # blocks.
        self._is_lost = self._lacks_blocks = False

    def run(self, messages: Messages) -> OverlapBlock | None:
        """Run until something needs the host between two steps, or nothing is left to do.

        Returns the reason if no step could be launched, else None.
        """
        step, drafting = self._step, self._drafting
        step.begin(drafting.captured_layers, max(step.number, drafting.number))
        phase = self._lifecycle.counters.phase
        is_ending = False
        self._read_at = time.perf_counter()
        while True:
            if not is_ending:
                self._let_requests_come()
                with phase("plan"):
                    messages.handle_messages()
                    self._free_seats()
                    is_ending = messages.is_stopping or not self._plan()
            is_ending |= not self._bind()
            if not is_ending and self._has_work():
                asked = self._post()
                num_prompt_rows = self._prefill()
                self._prepare_lookups(num_prompt_rows)
                # All of that overlaps with the step in flight, whose tokens look-ups need.
                is_sound = self._read_for_lookups()
                # Prompts wait for this step, so it is launched whether or not the drafter is there.
                is_ending = not (self._launch(asked, num_prompt_rows) and is_sound)
            if not step.num_in_flight:
                break
            if is_ending or step.num_in_flight == MAX_IN_FLIGHT or not self._has_work():
                is_ending |= not self._bind()
                is_ending |= not self._read()
            self._lifecycle.publish()
        self._end()
        return OverlapBlock.NO_FREE_BLOCKS if self._lacks_blocks and self._num_launched == 0 else None

    # 0. Let requests come.

    def _let_requests_come(self) -> None:
        """Wait while a step runs that takes long enough; who comes after the next launch waits for one step more."""
        step = self._step
        if step.num_in_flight == 1 and step.is_bound and not self._lookups.are_due:
            num_seats = sum(seat is not None for seat in step.seating.seats)
            # The running step began when the one before was done.
            until = self._done_at + self._launch_time.wait_s(self._step_s(self._launched_shape, num_seats))
            with self._lifecycle.counters.phase("let_come"):
                while time.perf_counter() < until and not step.is_done():
                    time.sleep(_POLL_S)
        self._planned_at = time.perf_counter()

    # 1. Plan.

    def _plan(self) -> bool:
        """Start waiting sequences and choose the trees' shape. Return whether the run can go on."""
        policy, scheduler, drafting = self._speculator.overlap, self._scheduler, self._drafting
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
        for seat in self._step.seating.seats:
            if seat is None or (is_same and len(seat.sequence.tokens) <= seat.enough_until):
                continue
            if not self._reserve_seat(seat.sequence):
                self._lacks_blocks = True
                return False
            seat.enough_until = self._enough_until(seat.sequence)
        return True

    def _enough_until(self, sequence: Sequence) -> int:
        """Return up to how many tokens a sequence needs no more blocks, whatever is in flight."""
        width = self._most_nodes(sequence)
        if self._scheduler.has_reserved(sequence, sequence.max_len + width + 1):
            return sequence.max_len
        num_slots = len(sequence.block_ids) * self._scheduler.blocks.block_size
        return num_slots - MAX_IN_FLIGHT * self._most_tokens(sequence) - width - 1

    def _reserve_seat(self, sequence: Sequence) -> bool:
        # One KV slot more, because a drafter stores the next root's KV entry before the target
        # does.
        width = self._most_nodes(sequence)
        most = sequence.max_len + width + 1
        in_flight = self._step.num_in_flight * self._most_tokens(sequence)
        least = min(len(sequence.tokens) + in_flight + width + 1, most)
        if self._scheduler.has_reserved(sequence, least):
            return True
        return self._scheduler.reserve_ahead(sequence, least, min(least + _PAGES_AHEAD, most))

    def _most_nodes(self, sequence: Sequence) -> int:
        """Return the most nodes of a sequence's next tree, whoever drafts it."""
        return max(self._drafting.shape_of(sequence).nodes, self._lookups.most_nodes(sequence))

    def _most_tokens(self, sequence: Sequence) -> int:
        """Return the most tokens that a step of this run commits for a sequence."""
        has_drafts = self._drafting.drafter is not None or self._lookups.most_nodes(sequence) > 1
        return self._step.max_tokens if has_drafts else 1

    def _has_work(self) -> bool:
        """Return whether a prompt waits, or a seat may emit more than steps in flight do."""
        num_in_flight = self._step.num_in_flight
        return bool(self._joining) or any(
            seat is not None and seat.sequence.max_new_tokens > num_in_flight for seat in self._step.seating.seats
        )

    # 2. Post the draft.

    def _post(self) -> _Asked:
        """Request the trees after the last step."""
        drafting, launched = self._drafting, self._launched
        kind = drafting.shape, seq_bucket(len(launched or ())), drafting.has_prompts
        if launched is not None:
            with self._lifecycle.counters.phase("draft_post"):
                drafting.post(self._step.number, launched, self._prompt_start)
        return _Asked(drafting.drafter is not None and launched is not None, kind)

    # 3. Launch.

    def _prefill(self) -> int:
        """Prepare a pass over the next prompt tokens, all but each prompt's last. Return its rows."""
        with self._lifecycle.counters.phase("prefill"):
            return self._prepare_prompts()

    def _prepare_lookups(self, num_prompt_rows: int) -> None:
        """Do what look-ups can do before the tokens of the step in flight are known."""
        with self._lifecycle.counters.phase("lookup"):
            seated = [seat.sequence for seat in self._step.seating.seats if seat is not None]
            self._lookups.prepare(seated, self._joining, has_prompts=num_prompt_rows > 0)

    def _read_for_lookups(self) -> bool:
        """Read the step in flight if look-ups wait for it. Return False if it had to go on without its trees."""
        if not self._lookups.are_due or not self._step.num_in_flight:
            return True
        is_sound = self._read()
        self._free_seats()
        return is_sound

    def _launch(self, asked: _Asked, num_prompt_rows: int) -> bool:
        """Seat sequences, look up, and launch the next step. Return whether there was anything to launch."""
        step, drafting, phase = self._step, self._drafting, self._lifecycle.counters.phase
        self._join()
        if drafting.shape != self._launched_shape:
            self._launched_shape = drafting.shape
            for index, seat in enumerate(step.seating.seats):
                if seat is not None:
                    step.seating.resize(index, drafting.shape_of(seat.sequence).nodes)
            step.seating.share_rows(drafting.shape.budget)
        self._launched = tuple(step.seating.seats)
        taken = [seat for seat in self._launched if seat is not None]
        if not taken and not num_prompt_rows:
            self._lacks_blocks = True
            return False
        self._num_launched += 1
        with phase("lookup"):
            is_drafted = asked.is_drafted and not self._is_lost
            found = {} if step.num_in_flight else self._lookups.find(self._launched, is_drafted=is_drafted)
        is_late = self._num_read > 0 and not step.num_in_flight
        with phase("launch"):
            has_joined = step.launch(is_drafted=asked.is_drafted, found=found)
        launched_at = time.perf_counter()
        self._launch_time.observe_launch(launched_at - self._planned_at)
        gap_s = launched_at - self._done_at if is_late else 0.0
        if is_late:
            self._lookups.observe_gap(gap_s)
        num_rows = sum(step.seating.num_rows(seat) for seat in taken)
        num_found_rows = sum(
            max(draft.tree.num_nodes - step.seating.num_rows(seat), 0)
            for index, draft in found.items()
            if (seat := self._launched[index]) is not None
        )
        is_timed = self._num_launched > _UNTIMED_STEPS and (drafting.drafter is None or drafting.is_for_all)
        self._facts.append(
            _Facts(
                drafting.shape,
                num_rows + num_found_rows,
                num_found_rows,
                len(taken),
                num_prompt_rows,
                has_joined,
                is_timed,
                asked.kind,
                gap_s,
                self._lookups.take_compared(),
            )
        )
        return True

    def _prepare_prompts(self) -> int:
        drafting, capture = self._drafting, self._speculator.hidden_states
        if not self._joining:
            return 0
        num_seats = sum(seat is not None for seat in self._step.seating.seats)
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
        sent = []
        for part, first_row in zip(parts, batch.row_starts, strict=True):
            self._lifecycle.advance(part.sequence, part.num_tokens)
            if drafting.send_prompt(part.sequence, part.num_rows):
                sent.append((first_row, part.num_rows))
        self._prompt_start = self._step.prefill(batch.forward, sent)
        return batch.forward.num_rows

    def _step_s(self, shape: Shape, num_seats: int) -> float:
        """Return the seconds that a step should take without prompts; 0 without seats."""
        return self._drafting.step_s(shape, num_seats, self._speculator.costs) if num_seats else 0.0

    def _join(self) -> None:
        """Seat the sequences of which all but the last token is computed, and all is sent."""
        waiting: list[Sequence] = []
        for sequence in self._joining:
            is_ready = sequence.num_uncomputed == 1 and self._drafting.has_sent(sequence)
            if not is_ready or not self._reserve_seat(sequence):
                waiting.append(sequence)
                continue
            width = self._drafting.shape_of(sequence).nodes
            seat = BatchRow(sequence, width, self._drafting.drafter_number, is_new=not sequence.is_decoding)
            self._step.seating.join(self._step.seating.free_seat(), seat)
        self._joining = waiting

    # 4. Bind late.

    def _bind(self) -> bool:
        """Send the masks of a step that was launched without them, once the step before was read.

        They depend on that step's tokens, and on the drafted trees. Returns False if the step had
        to go on without its trees.
        """
        step, phase = self._step, self._lifecycle.counters.phase
        if step.is_bound or step.num_in_flight > 1:
            return True
        with phase("wait"):
            is_alive = self._await(step.has_trees)
        with phase("bind"):
            step.bind(
                {
                    index: ENDED if seat.is_left else seat.sequence.sampler.tree_masks(tokens, parents)
                    for index, (seat, tokens, parents) in step.trees().items()
                }
            )
        return is_alive

    # 5. Wait and read.

    def _read(self) -> bool:
        """Wait for the oldest step, and commit its tokens. Return False if it had to go on without its trees."""
        phase = self._lifecycle.counters.phase
        with phase("wait"):
            if self._drafting.drafter is None and self._lookups.are_due:
                # The GPU waits too, and there is no drafter to look after.
                self._step.wait()
            is_sound = self._await(self._step.is_done)
        self._done_at = time.perf_counter()
        # The first step of a run waits for no draft.
        if is_sound and self._num_read:
            self._deadlines.observe(self._facts[0].kind, self._done_at - self._read_at)
        with phase("commit"):
            self._commit()
        return is_sound

    def _await(self, is_there: Callable[[], bool]) -> bool:
        """Wait for something of the oldest step. Return False if it had to go on without its trees."""
        facts = self._facts[0]
        timeout_s = self._deadlines.seconds(facts.kind)
        deadline = self._read_at + timeout_s + _TOKEN_S * sum(each.num_prompt_rows for each in self._facts)
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

    def _commit(self) -> None:
        """Commit the oldest step's tokens."""
        drafting, lifecycle, facts = self._drafting, self._lifecycle, self._facts.popleft()
        self._num_read += 1
        num_live = 0
        why_none = partial(self._speculator.fallbacks.of_overlapped, drafting=drafting, shape=facts.shape)
        why_first = partial(why_none, is_first=True)
        for seat, walk, num_nodes, found in self._step.receive():
            num_live += num_nodes > 0
            if num_nodes == 0 or seat.is_left:
                continue
            sequence = seat.sequence
            num_drafted = num_nodes if found is None else 1
            shares = drafting.observe(
                sequence,
                num_drafted,
                len(walk.matched_nodes),
                len(walk.tokens),
                got_no_row=bool(facts.shape.budget) and found is None and seat.has_stepped,
            )
            compared = facts.compared.get(sequence)
            if compared is not None:
                self._speculator.outcomes.observe_passed_over(sequence, compared.passed_over, walk.tokens)
            if found is not None and num_nodes == found.tree.num_nodes:
                shares = found.shares(walk.matched_nodes)
                self._speculator.outcomes.observe(sequence, found, walk.matched_nodes, shares)
            if seat.is_new:
                seat.is_new = False
                lifecycle.append(sequence, 1, walk)
            else:
                lifecycle.commit_decode(sequence, walk, shares, why_none if seat.has_stepped else why_first)
            # A root alone is a missing tree, unless seats share rows. A text that ends tells too little.
            if compared is not None and (num_nodes > 1 or facts.shape.budget) and not seat.is_left:
                self._lookups.observe_model(len(walk.tokens), compared)
            seat.has_stepped = True
        drafting.learn(facts.shape)
        self._learn_times(facts)
        self._speculator.limit.count(num_live)

    def _learn_times(self, facts: _Facts) -> None:
        """Learn what the step took that was just read."""
        drafting, now = self._drafting, time.perf_counter()
        seconds, self._read_at = now - self._read_at, now
        is_timed = facts.is_timed and facts.num_seats > 0
        is_plain = is_timed and drafting.drafter is None and not facts.num_prompt_rows
        self._lifecycle.count_overlapped_step(seconds)
        self._launch_time.observe_step(seconds)
        costs = self._speculator.costs
        if is_plain:
            costs.observe_step(facts.num_rows, seconds - facts.gap_s)
        if facts.num_prompt_rows and self._num_read > _UNTIMED_STEPS:
            step_s = self._step_s(facts.shape, facts.num_seats)
            self._scheduler.prefill.observe(facts.num_prompt_rows, seconds, step_s, has_joined=facts.has_joined)
        if is_timed and drafting.controller is not None:
            # What rows of look-ups take says nothing of the shape, nor does a launch that the GPU waited for.
            base_rows = facts.num_rows - facts.num_found_rows
            extra_s = costs.plain_step_s(facts.num_rows) - costs.plain_step_s(base_rows) + self._late_s(facts)
            drafting.controller.controller.observe_step(
                facts.shape, facts.num_seats, seconds - extra_s, num_prompt_tokens=facts.num_prompt_rows
            )

    def _late_s(self, facts: _Facts) -> float:
        """Return the seconds for which the GPU had no work before a step, not even drafts."""
        assert self._drafting.controller is not None
        return max(facts.gap_s - self._drafting.controller.controller.draft_s(facts.shape, facts.num_seats), 0.0)

    def _free_seats(self) -> None:
        """Free the seats of sequences that have ended, and forget those that wait for one."""
        for index, seat in enumerate(self._step.seating.seats):
            if seat is not None and seat.is_left:
                self._step.seating.leave(index)
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
        self._speculator.end_overlap(self._lookups, self._num_read, [s for s in running if s.is_decoding])
