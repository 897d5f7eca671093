"""Choose the sequences of the next step: decode rows first, then prefill chunks, oldest first.

The scheduler moves sequences between waiting and running, and reserves their blocks. If blocks run
out, it preempts the youngest sequence. A priority comes before age: lower numbers start first and
are preempted last. The scheduler knows no tensors and no drafters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from verifier_svc.scheduling.batch import Scheduled
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.sequence import NO_BATCH_SLOT, Sequence


class Scheduler:
    """Batch sequences continuously over one block manager. Only the engine thread uses it."""

    def __init__(self, blocks: BlockManager, *, max_running: int, max_waiting: int, prefill: PrefillBudget) -> None:
        """
        Args:
            max_running: most sequences that run at once.
            max_waiting: most sequences that wait.
            prefill: chooses the prompt tokens of one step.
        """
        self.blocks = blocks
        self.max_running = max_running
        self._max_waiting = max_waiting
        self.prefill = prefill
        self._free_batch_slots = list(range(max_running - 1, -1, -1))
        self._generations = [0] * max_running
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        # Tokens that were looked up in the prefix cache, and tokens that were found.
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_full(self) -> bool:
        """Return whether the queue refuses another new sequence."""
        return self.room <= 0

    @property
    def room(self) -> int:
        """Return how many more sequences the queue takes; negative if resumed ones overfill it.

        Sequences that the next step can start do not count as waiting. Any thread may call this;
        the answer is approximate.
        """
        return self._max_waiting + len(self._free_batch_slots) - len(self.waiting)

    @property
    def num_soon(self) -> int:
        """Return how many sequences will run together once waiting prompts are computed."""
        return len(self.running) + min(len(self.waiting), len(self._free_batch_slots))

    @property
    def admissible(self) -> list[Sequence]:
        """Return the waiting sequences for which there are batch slots, though maybe no blocks."""
        return list(islice(self.waiting, len(self._free_batch_slots)))

    def reserve_ahead(self, sequence: Sequence, least: int, wanted: int) -> bool:
        """Reserve blocks for ``wanted`` tokens of a running sequence, or else for ``least``.

        Returns whether there were blocks for ``least`` tokens.
        """
        return self._reserve(sequence, wanted) or self._reserve(sequence, least)

    def has_reserved(self, sequence: Sequence, num_kv_slots: int) -> bool:
        """Return whether a running sequence has blocks for ``num_kv_slots`` tokens."""
        return len(sequence.block_ids) * self.blocks.block_size >= num_kv_slots

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, resumed ones before new ones. The caller decides whether it fits."""
        self._queue(sequence, first=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence and free its blocks."""
        if sequence.batch_slot == NO_BATCH_SLOT:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._release(sequence)

    def schedule(
        self, num_nodes: Callable[[Sequence], int], step_s: Callable[[int], float], now: float
    ) -> list[Scheduled]:
        """Return the next step's parts, with blocks reserved.

        Args:
            num_nodes: returns the nodes of a sequence's tree, including the root.
            step_s: returns the seconds of a step of so many decode rows, without prompts.
            now: seconds of time.monotonic().
        """
        scheduled: list[Scheduled] = []
        for sequence in [s for s in self.running if s.is_decoding]:
            if sequence.batch_slot == NO_BATCH_SLOT:
                continue  # an older sequence has just preempted it
            nodes = self._reserve_nodes(sequence, num_nodes(sequence))
            if nodes:
                scheduled.append(Scheduled(sequence, 1, nodes))
        prefilling = [s for s in self.running if not s.is_decoding]
        num_rows = sum(part.max_nodes for part in scheduled)
        budget = 0
        if prefilling or self.waiting:
            budget = self.prefill.tokens(step_s(num_rows) if num_rows else 0.0)
        for sequence in prefilling:
            if budget <= 0:
                break
            if sequence.batch_slot == NO_BATCH_SLOT:
                continue  # an older sequence has just preempted it
            budget -= self._schedule_chunk(sequence, budget, scheduled)
        while budget > 0 and self._free_batch_slots:
            admitted = self.admit(now)
            if admitted is None:
                break
            budget -= self._schedule_chunk(admitted, budget, scheduled)
        return scheduled

    def _reserve_nodes(self, sequence: Sequence, nodes: int) -> int:
        """Reserve blocks for a decode row.

        Returns the nodes that have room: all, the root alone, or 0 if the sequence itself was
        preempted.

        It reserves one KV slot more if it can, because a drafter stores the next root's KV entry
        before the target does.
        """
        least = sequence.num_computed + nodes
        if self.reserve_ahead(sequence, least, least + 1):
            return nodes
        while not self._reserve(sequence, sequence.num_computed + 1):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return 0
        return 1

    def _schedule_chunk(self, sequence: Sequence, budget: int, scheduled: list[Scheduled]) -> int:
        """Schedule a sequence's next prefill chunk. Return its tokens; 0 if blocks are missing."""
        num_tokens = min(sequence.num_uncomputed, budget)
        self._reserve(sequence, sequence.num_computed + num_tokens + 1)
        if not self._reserve(sequence, sequence.num_computed + num_tokens):
            # Older sequences go on and will free blocks. If there is none, preempt the younger
            # ones.
            if scheduled or sequence is not self.running[0]:
                return 0
            while not self._reserve(sequence, sequence.num_computed + num_tokens):
                if self.running[-1] is sequence:
                    raise AssertionError("one sequence does not fit into the cache: the context limit is wrong")
                self._preempt(self.running[-1])
        scheduled.append(Scheduled(sequence, num_tokens, 1))
        return num_tokens

    def _reserve(self, sequence: Sequence, num_kv_slots: int) -> bool:
        table = sequence.table
        assert table is not None
        if not self.blocks.can_reserve(table, num_kv_slots):
            return False
        self.blocks.reserve(table, num_kv_slots)
        return True

    def admit(self, now: float) -> Sequence | None:
        """Start the first waiting sequence that may start, and return it; None if none may.

        There must be a free batch slot.
        """
        for sequence in self.waiting:
            if self.blocks.enable_prefix_cache and self._waits_for_sibling(sequence):
                continue
            tokens = sequence.tokens if not sequence.wants_prompt_logprobs else []
            table = self.blocks.match_prefix(tokens, sequence.submission.cache_salt)
            # Require room for the whole prefill, so that a started sequence can finish it.
            if self.running and not self.blocks.can_reserve(table, len(sequence.tokens) + 1):
                self.blocks.free(table)
                return None
            self.waiting.remove(sequence)
            self.num_prefix_queries += len(tokens)
            self.num_prefix_hits += table.num_cached_tokens
            sequence.table = table
            sequence.num_computed = table.num_cached_tokens
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = min(table.num_cached_tokens, sequence.num_prompt_tokens)
                sequence.times.started_at = now
            batch_slot = self._free_batch_slots.pop()
            self._generations[batch_slot] += 1
            sequence.batch_slot, sequence.generation = batch_slot, self._generations[batch_slot]
            self._insert_by_rank(sequence)
            return sequence
        return None

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Return whether another choice of its request is in prefill: it can reuse its blocks."""
        return any(
            other.key[:2] == sequence.key[:2] and not other.is_decoding and other.num_output_tokens == 0
            for other in self.running
        )

    def _insert_by_rank(self, sequence: Sequence) -> None:
        """Insert a running sequence by priority, then by age: the last one is preempted first."""
        rank = _running_rank(sequence)
        index = len(self.running)
        while index and _running_rank(self.running[index - 1]) > rank:
            index -= 1
        self.running.insert(index, sequence)

    def _queue(self, sequence: Sequence, *, first: bool) -> None:
        """Insert a waiting sequence, first or last among its equals."""
        rank = _waiting_rank(sequence)
        index = len(self.waiting)
        while index:
            other = _waiting_rank(self.waiting[index - 1])
            if other < rank or (other == rank and not first):
                break
            index -= 1
        self.waiting.insert(index, sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks and put it first in the queue of its priority.

        It keeps its tokens.
        """
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.forget_cache()
        self._queue(sequence, first=True)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.blocks.free(sequence.table)
        self._free_batch_slots.append(sequence.batch_slot)
        sequence.table = None
        sequence.batch_slot = NO_BATCH_SLOT


def _running_rank(sequence: Sequence) -> tuple[int, float]:
    """Return a running sequence's place: by priority, then by age."""
    return sequence.submission.priority, sequence.times.arrived_at


def _waiting_rank(sequence: Sequence) -> tuple[int, bool]:
    """Return a waiting sequence's place.

    It goes by priority, then resumed and preempted sequences come before new ones.
    """
    has_run = sequence.submission.attempt > 0 or sequence.times.started_at is not None
    return sequence.submission.priority, not has_run
