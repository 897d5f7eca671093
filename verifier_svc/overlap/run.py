"""Run overlapped steps: the host launches a step before it has read the last one.

Sequences join and end while steps are in flight. Each turn of the loop

0. handles messages, chooses the shape of the next trees and requests them: those that follow the
   step in flight;
1. lets a part of the running step's time pass: requests that come meanwhile join the next one;
2. handles messages and starts waiting sequences;
3. launches the next step, for whose trees the GPU waits. Prompts are part of the target's pass if
   there is a graph with room for them (verifier_svc/overlap/joined_prompts.py), else of a pass
   before it;
4. waits for the step in flight, reads it, commits its tokens and publishes them;
5. binds late what the next step needs of these tokens: masks of grammars and of token lists, and
   look-ups.

A step with masks is launched in two halves: rows and the target's pass in 3, sampling and all after
it in 5. The masks are computed while the pass runs. If a sequence of the next step wants a look-up,
4 comes before that launch, and between them the host commits the step's tokens, gives out batch
rows and looks up.

A run ends, once the steps in flight are read, when something else needs the host between two steps
(logprobs of a prompt), a drafter attaches or detaches, blocks run out, or nothing is left to do. If
trees were requested by then, their step is launched first: the request after it tells the drafter
that the run ends.

A sequence's blocks go to others as soon as the host has read its end, although steps are in flight,
because those steps do not write to them:

- Step n, which ends a sequence, sets num_left = 0 (advance_batch) after the target's pass and
  before kv_commit. The host reads step n, and so frees the blocks, after all of that.
- Step n + 1 may be launched by then. Its lay_out_rows finds num_left = 0 and gives the batch row no
  rows, so it writes and reads no KV entry, has no accepted nodes to move, and no tokens for a
  drafter.
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
from functools import partial
from typing import TYPE_CHECKING, Protocol

from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.lifecycle import Lifecycle
from verifier_svc.overlap.blocks import OverlapBlocks
from verifier_svc.overlap.step_walks import StepWalks
from verifier_svc.overlap.times import OverlapTimes, StepFacts
from verifier_svc.overlap.tree_request import PostedRequest, TreeRequest
from verifier_svc.overlap.wait import POLL_S, OverlapWait
from verifier_svc.sampling.allowed_tokens import ENDED
from verifier_svc.scheduling.batch import Scheduled, build_batch
from verifier_svc.scheduling.batch_row import MAX_IN_FLIGHT, BatchRow
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.overlap_policy import OverlapObstacle
from verifier_svc.speculation.overlap_requests import OverlapRequests
from verifier_svc.speculation.speculator import Speculator

if TYPE_CHECKING:
    from verifier_svc.overlap.step import OverlappedStep


class RunningEngine(Protocol):
    """What a run needs of the engine."""

    def handle_messages(self) -> None:
        """Handle messages, and end overdue sequences."""
        ...

    @property
    def is_stopping(self) -> bool: ...


class OverlappedRun:
    """One run of overlapped steps. Only the engine thread uses it."""

    def __init__(
        self,
        step: OverlappedStep,
        drafting: OverlapDrafting,
        scheduler: Scheduler,
        speculator: Speculator,
        lifecycle: Lifecycle,
        deadlines: StepDeadlines,
    ) -> None:
        self._step, self._drafting = step, drafting
        self._scheduler, self._speculator, self._lifecycle = scheduler, speculator, lifecycle
        self._lookups = speculator.begin_overlap(drafting, scheduler.running, step.max_tokens - 1)
        self._requests, self._walks = OverlapRequests(drafting), StepWalks(drafting)
        self._blocks = OverlapBlocks(step, drafting, scheduler, self._lookups)
        self._times = OverlapTimes(drafting, speculator.costs, scheduler.prefill)
        self._wait = OverlapWait(step, drafting, deadlines)
        self._trees = TreeRequest(drafting, self._requests, speculator.overlap, self._blocks, lifecycle.counters)
        # Running sequences that have no batch row yet.
        self._joining: list[Sequence] = list(scheduler.running)
        # The trees' shape in which steps are launched.
        self._launched_shape = drafting.shape
        # The batch rows of the last launched step, and where its prompts' hidden states begin.
        self._launched: tuple[BatchRow | None, ...] | None = None
        self._prompt_start = 0
        # Of the steps in flight.
        self._facts: deque[StepFacts] = deque()
        # Whether missing blocks left a launch without a batch row and without prompts to compute.
        self._lacks_blocks = False

    def run(self, engine: RunningEngine) -> OverlapObstacle | None:
        """Run until something needs the host between two steps, or nothing is left to do.

        Return NO_FREE_BLOCKS if missing blocks prevented the first step, else None.
        """
        step, drafting = self._step, self._drafting
        step.begin(drafting.captured_layers, max(step.number, drafting.number))
        is_ending = False
        self._times.begin()
        while True:
            if not is_ending:
                is_ending = not (self._request_trees(engine) and self._plan(engine))
            is_ending |= not self._bind()
            if self._has_work() and (not is_ending or self._trees.is_awaited):
                posted = self._post()
                num_prompt_rows = self._prefill(is_ending=is_ending)
                self._prepare_lookups(num_prompt_rows)
                # All of that overlaps with the step in flight, whose tokens look-ups need.
                is_sound = self._read_for_lookups()
                # Prompts wait for this step, so it is launched whether or not the drafter is there.
                is_ending |= not (self._launch(posted, num_prompt_rows, is_ending=is_ending) and is_sound)
            if not step.in_flight:
                break
            if is_ending or len(step.in_flight) == MAX_IN_FLIGHT or not self._has_work():
                is_ending |= not self._bind()
                is_ending |= not self._read()
            self._lifecycle.publish()
        self._end()
        lacks_blocks = self._lacks_blocks or self._trees.lacks_blocks
        return OverlapObstacle.NO_FREE_BLOCKS if lacks_blocks and self._times.num_launched == 0 else None

    # 0. Request the next trees.

    def _request_trees(self, engine: RunningEngine) -> bool:
        """Request the next trees, and let requests come. Return whether the run can go on.

        The trees follow the step in flight, so requests that come later change nothing of them. The
        drafter's host has the rest of that step's time for them.
        """
        # A step without its masks is bound first: until then the host lets no requests come.
        if self._step.in_flight.is_bound and self._launched is not None:
            if not self._plan(engine):
                return False
            if self._has_work():
                self._post()
        self._let_requests_come()
        return True

    def _plan(self, engine: RunningEngine) -> bool:
        """Handle messages, start waiting sequences, and choose the shape of the next trees.

        Return whether the run can go on.
        """
        with self._lifecycle.counters.phase("plan"):
            engine.handle_messages()
            self._free_batch_rows()
            if engine.is_stopping or not self._start_waiting():
                return False
            return not self._has_work() or self._trees.choose(len(self._scheduler.running))

    def _post(self) -> PostedRequest:
        """Request the trees after the last step, unless that was done."""
        return self._trees.post(self._step.number, self._launched, self._prompt_start)

    def _has_work(self) -> bool:
        """Return whether a prompt waits, or a batch row may emit more than steps in flight do."""
        num_in_flight = len(self._step.in_flight)
        return bool(self._joining) or any(
            batch_row is not None and batch_row.sequence.max_new_tokens > num_in_flight
            for batch_row in self._step.batch_rows.rows
        )

    # 1. Let requests come.

    def _let_requests_come(self) -> None:
        """Wait while a step runs that takes long enough.

        A request that comes after the next launch waits for one step more.
        """
        step = self._step
        if len(step.in_flight) == 1 and step.in_flight.is_bound and not self._lookups.are_due:
            num_batch_rows = sum(batch_row is not None for batch_row in step.batch_rows.rows)
            until = self._times.launch_from(self._launched_shape, num_batch_rows)
            with self._lifecycle.counters.phase("let_come"):
                while time.perf_counter() < until and not step.in_flight.is_done():
                    time.sleep(POLL_S)
        self._times.begin_launch()

    # 2. Start waiting sequences.

    def _start_waiting(self) -> bool:
        """Start the sequences that wait. Return whether the run can go on."""
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
        return policy.still_drafts(drafting, scheduler.running, scheduler.admissible)

    # 3. Launch.

    def _prefill(self, *, is_ending: bool) -> int:
        """Prepare a pass over the next prompt tokens, all but each prompt's last.

        Return its number of rows: none if the run is about to end.
        """
        if is_ending:
            return 0
        with self._lifecycle.counters.phase("prefill"):
            return self._prepare_prompts()

    def _prepare_lookups(self, num_prompt_rows: int) -> None:
        """Do what look-ups can do before the tokens of the step in flight are known."""
        with self._lifecycle.counters.phase("lookup"):
            joined = [batch_row.sequence for batch_row in self._step.batch_rows.rows if batch_row is not None]
            self._lookups.prepare(joined, self._joining, has_prompts=num_prompt_rows > 0)

    def _read_for_lookups(self) -> bool:
        """Read the step in flight if look-ups wait for it.

        Return False if it had to go on without its trees.
        """
        if not self._lookups.are_due or not self._step.in_flight:
            return True
        is_sound = self._read()
        self._free_batch_rows()
        return is_sound

    def _launch(self, posted: PostedRequest, num_prompt_rows: int, *, is_ending: bool) -> bool:
        """Give out batch rows unless the run is about to end, look up, and launch the next step.

        Return False if there is nothing to do.
        """
        step, drafting, phase = self._step, self._drafting, self._lifecycle.counters.phase
        if not is_ending:
            self._join()
        if drafting.shape != self._launched_shape:
            self._launched_shape = drafting.shape
            for index, batch_row in enumerate(step.batch_rows.rows):
                if batch_row is not None:
                    step.batch_rows.resize(index, drafting.shape_of(batch_row.sequence).nodes)
            step.batch_rows.share_rows(drafting.shape.budget)
        self._launched = tuple(step.batch_rows.rows)
        self._trees.begin_next()
        taken = [batch_row for batch_row in self._launched if batch_row is not None]
        if not taken and not num_prompt_rows:
            self._lacks_blocks = True
            return False
        with phase("lookup"):
            is_drafted = posted.is_drafted and not self._wait.is_lost
            found = {} if step.in_flight else self._lookups.find(self._launched, is_drafted=is_drafted)
        is_late = self._times.num_read > 0 and not step.in_flight
        with phase("launch"):
            has_joined = step.launch(is_drafted=posted.is_drafted, found=found)
        gap_s = self._times.observe_launch(is_late=is_late)
        if is_late:
            self._lookups.observe_gap(gap_s)
        budget = drafting.shape.budget
        num_rows = sum(batch_row.num_rows(budget) for batch_row in taken)
        num_found_rows = sum(
            batch_row.num_added_rows(draft, budget)
            for index, draft in found.items()
            if (batch_row := self._launched[index]) is not None
        )
        self._facts.append(
            StepFacts(
                shape=drafting.shape,
                num_rows=num_rows + num_found_rows,
                num_found_rows=num_found_rows,
                num_batch_rows=len(taken),
                num_prompt_rows=num_prompt_rows,
                has_joined=has_joined,
                is_timed=self._times.is_typical and (drafting.drafter is None or self._requests.is_for_all),
                kind=posted.kind,
                launched_at=self._times.launched_at,
                gap_s=gap_s,
                passed_over=self._lookups.take_passed_over(),
            )
        )
        return True

    def _prepare_prompts(self) -> int:
        requests, capture = self._requests, self._speculator.hidden_states
        if not self._joining:
            return 0
        num_batch_rows = sum(batch_row is not None for batch_row in self._step.batch_rows.rows)
        room = self._scheduler.prefill.tokens(self._times.step_s(self._drafting.shape, num_batch_rows))
        parts: list[Scheduled] = []
        for sequence in self._joining:
            part = Scheduled(sequence, min(sequence.num_uncomputed - 1, room), 1)
            if sequence.num_computed and requests.is_new_to_drafter(sequence):
                # A drafter needs the hidden states at the end of a cached prefix.
                part.num_rerun = capture.num_rerun(sequence)
            part.num_tokens = min(part.num_tokens, room - part.num_rerun)
            end = sequence.num_computed + part.num_tokens
            # The drafter is sent one token more than is computed, with its block.
            if part.num_tokens < 0 or not self._scheduler.reserve_ahead(sequence, end + 1, end + 1):
                continue
            if not requests.reserve_room(sequence, end):
                continue
            if part.num_rows:
                parts.append(part)
                room -= part.num_rows
            elif self._drafting.is_for(sequence):
                requests.send_prompt(sequence, 0)
        if not parts:
            return 0
        blocks = self._lifecycle.blocks
        batch = build_batch(parts, blocks.block_size, blocks.num_blocks * blocks.block_size)
        sent = []
        for part, first_row in zip(parts, batch.row_starts, strict=True):
            self._lifecycle.advance(part.sequence, part.num_tokens)
            if requests.send_prompt(part.sequence, part.num_rows):
                sent.append((first_row, part.num_rows))
        self._prompt_start = self._step.prefill(batch.forward, sent)
        return batch.forward.num_rows

    def _join(self) -> None:
        """Give a batch row to each sequence whose tokens are sent and, but the last, computed."""
        waiting: list[Sequence] = []
        num_batch_rows = sum(batch_row is not None for batch_row in self._step.batch_rows.rows)
        for sequence in self._joining:
            is_ready = sequence.num_uncomputed == 1 and self._requests.has_sent(sequence)
            if not is_ready or not self._trees.suits(num_batch_rows + 1) or not self._blocks.reserve_for(sequence):
                waiting.append(sequence)
                continue
            num_batch_rows += 1
            width = self._drafting.shape_of(sequence).nodes
            batch_row = BatchRow(sequence, width, self._drafting.drafter_number, is_new=not sequence.is_decoding)
            self._step.batch_rows.join(self._step.batch_rows.free_row(), batch_row)
        self._joining = waiting

    # 4. Wait and read.

    def _read(self) -> bool:
        """Wait for the oldest step, and commit its tokens.

        Return False if it had to go on without its trees.
        """
        phase = self._lifecycle.counters.phase
        with phase("wait"):
            if self._drafting.drafter is None and self._lookups.are_due:
                # The GPU waits too, and there is no drafter to look after.
                self._step.in_flight.wait()
            since = self._times.begun_at(self._facts[0])
            is_sound = self._wait.until(self._step.in_flight.is_done, self._facts, since)
        seconds = self._times.mark_done(self._facts[0])
        # The first step of a run waits for no draft.
        if is_sound and self._times.num_read:
            self._wait.deadlines.observe(self._facts[0].kind, seconds)
        with phase("commit"):
            self._commit(is_sound=is_sound)
        return is_sound

    def _commit(self, *, is_sound: bool) -> None:
        """Commit the oldest step's tokens. ``is_sound``: whether it did not have to miss trees."""
        drafting, lifecycle, facts = self._drafting, self._lifecycle, self._facts.popleft()
        num_live = 0
        has_shared = bool(facts.shape.budget) and is_sound
        why_none = partial(
            self._speculator.fallbacks.of_overlapped, drafting=drafting, shape=facts.shape, has_shared=has_shared
        )
        why_first = partial(why_none, is_first=True)
        for batch_row, walk, num_nodes, found in self._step.in_flight.receive():
            num_live += num_nodes > 0
            if num_nodes == 0 or batch_row.is_left:
                continue
            sequence = batch_row.sequence
            shares: tuple[DrafterShare, ...] = ()
            if self._requests.count_tokens(sequence, len(walk.tokens)):
                had_draft = has_shared and batch_row.has_stepped and sequence.max_new_tokens > 1
                shares = self._walks.observe(
                    num_nodes if found is None else 1,
                    len(walk.matched_nodes),
                    got_no_row=had_draft and found is None,
                )
            passed_over = facts.passed_over.get(sequence)
            if passed_over is not None:
                self._speculator.outcomes.observe_passed_over(sequence, passed_over.draft, walk.tokens)
            if found is not None and num_nodes == found.tree.num_nodes:
                shares = found.shares(walk.matched_nodes)
                self._speculator.outcomes.observe(sequence, found, walk.matched_nodes, shares)
            if batch_row.is_new:
                batch_row.is_new = False
                lifecycle.append(sequence, 1, walk)
            else:
                lifecycle.commit_decode(sequence, walk, shares, why_none if batch_row.has_stepped else why_first)
            # A root alone is a missing tree, unless batch rows share rows. A text that ends tells
            # too little.
            if passed_over is not None and (num_nodes > 1 or facts.shape.budget) and not batch_row.is_left:
                self._lookups.observe_model(len(walk.tokens), passed_over)
            batch_row.has_stepped = True
        self._walks.learn(facts.shape)
        lifecycle.count_overlapped_step(self._times.learn(facts))
        self._speculator.limit.count(num_live)

    # 5. Bind late.

    def _bind(self) -> bool:
        """Send the masks of a step that was launched without them, once the step before was read.

        They depend on that step's tokens, and on the drafted trees. Returns False if the step had
        to go on without its trees.
        """
        step, phase = self._step, self._lifecycle.counters.phase
        if step.in_flight.is_bound or len(step.in_flight) > 1:
            return True
        with phase("wait"):
            since = self._times.begun_at(self._facts[0])
            is_alive = self._wait.until(step.in_flight.has_trees, self._facts, since)
        with phase("bind"):
            step.bind(
                {
                    index: ENDED if batch_row.is_left else batch_row.sequence.sampler.tree_masks(tokens, parents)
                    for index, (batch_row, tokens, parents) in step.in_flight.trees().items()
                }
            )
        self._times.mark_bound()
        return is_alive

    # At any time.

    def _free_batch_rows(self) -> None:
        """Free the batch rows of sequences that have ended, and forget those that wait for one."""
        for index, batch_row in enumerate(self._step.batch_rows.rows):
            if batch_row is not None and batch_row.is_left:
                self._step.batch_rows.leave(index)
                self._drop(batch_row.sequence)
        for sequence in [sequence for sequence in self._joining if sequence.table is None]:
            self._joining.remove(sequence)
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._drafting.drop(sequence)
        self._requests.drop(sequence)

    def _end(self) -> None:
        running = self._scheduler.running
        self._requests.end(self._step.number, self._launched or (), self._prompt_start)
        for sequence in running:
            # The hidden states of these steps were never copied to the host.
            sequence.hidden_states.clear()
        self._speculator.end_overlap(self._lookups, self._times.num_read, [s for s in running if s.is_decoding])
