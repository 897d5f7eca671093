"""Model a verifier in numbers only: its queue, batch, prefix cache and step times.

It decodes all running sequences in each step, and computes prompts in chunks beside them, oldest
first, as ``verifier_svc/scheduling/scheduler.py`` does. Steps without prompts are counted together:
nothing happens in them until a sequence ends or comes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from benchmarks.routing.modelled_cache import ModelledCache
from benchmarks.routing.trace import Request


@dataclass(frozen=True)
class Costs:
    """What a verifier can do.

    By default an 8B model on one H200, in numbers of ``docs/gpu-steps.md``.

    Attributes:
        step_s: seconds of a step, besides what its rows and prompt tokens add.
        row_s: seconds that a decoding sequence adds to a step.
        token_s: seconds that a prompt token adds.
        rows: sequences that run at once.
        cache_tokens: tokens in the KV cache.
        chunk_tokens: prompt tokens of one step.
        limit_s: seconds that a step with prompts should take at most; infinity: no limit.
    """

    step_s: float = 4.25e-3
    row_s: float = 1.86e-5
    token_s: float = 2.3e-5
    rows: int = 256
    cache_tokens: int = 400_000
    chunk_tokens: int = 2048
    limit_s: float = 0.06


@dataclass(eq=False, slots=True)
class ModelledRequest:
    """One request on its way; ``num_done`` output tokens survive the death of its verifier."""

    request: Request
    gateway: int
    num_done: int = 0
    # Prompt tokens, and output tokens of an earlier attempt, that are still to be computed.
    num_uncomputed: int = 0
    queued_s: float = math.nan
    first_token_s: float = math.nan
    ended_s: float = math.nan
    # When its verifier died, and the seconds until its next token.
    lost_at: float = math.nan
    pause_s: float = math.nan

    @property
    def num_left(self) -> int:
        return self.request.output_length - self.num_done


@dataclass
class Counts:
    """What a verifier has done."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    num_requests: int = 0
    busy_s: float = 0.0
    # Sum over time of the sequences that ran or waited.
    sequence_s: float = 0.0


@dataclass
class _EqualSteps:
    """Equal steps that have begun: nothing changes before the last of them ends."""

    begins_s: float
    step_s: float
    num_steps: int
    # Prompt tokens by sequence that the one step computes.
    chunks: list[tuple[ModelledRequest, int]] = field(default_factory=list)

    @property
    def ends_s(self) -> float:
        return self.begins_s + self.step_s * self.num_steps


@dataclass
class SharedCores:
    """The cores of the machine that verifiers run on; by default enough for all of them.

    Attributes:
        num_cores: cores that they have together; each uses one at most.
        num_busy: verifiers that compute.
    """

    num_cores: float = math.inf
    num_busy: int = 0

    @property
    def slowness(self) -> float:
        """Return how many times longer a step takes than on a core of its own."""
        return max(self.num_busy / self.num_cores, 1.0)


class ModelledVerifier:
    """One verifier. Its owner calls ``submit`` and, at ``next_s``, ``advance``."""

    def __init__(self, costs: Costs, block_tokens: int, cores: SharedCores | None = None) -> None:
        """``cores``: shared with other verifiers; None: its own."""
        self.counts = Counts()
        self._costs = costs
        self._block_tokens = block_tokens
        self._waiting: deque[ModelledRequest] = deque()
        self._prefilling: deque[ModelledRequest] = deque()
        self._decoding: list[ModelledRequest] = []
        self._cache = ModelledCache(costs.cache_tokens // block_tokens)
        self._cores = cores or SharedCores()
        self._plan: _EqualSteps | None = None
        self._changed_s = 0.0

    @property
    def num_sequences(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def fill(self) -> float:
        """Share of the KV cache that running sequences use."""
        return self._cache.fill

    @property
    def next_s(self) -> float:
        """When something changes next; infinity if nothing does."""
        return math.inf if self._plan is None else self._plan.ends_s

    def submit(self, sequence: ModelledRequest, now: float) -> None:
        """Take a sequence; it joins at the end of the step that runs."""
        self._count_load(now)
        self._waiting.append(sequence)
        plan = self._plan
        if plan is None:
            self._cores.num_busy += 1
            self._begin(now)
        elif not plan.chunks and len(self._decoding) + len(self._prefilling) < self._costs.rows:
            # Steps that were counted together are cut after the one that runs now.
            plan.num_steps = min(plan.num_steps, max(math.ceil((now - plan.begins_s) / plan.step_s), 1))

    def advance(self, now: float) -> list[ModelledRequest]:
        """End the planned steps, begin the next ones, and return the sequences that finished."""
        plan = self._plan
        assert plan is not None
        self._count_load(now)
        self.counts.busy_s += plan.ends_s - plan.begins_s
        finished = []
        for sequence in self._decoding:
            sequence.num_done += plan.num_steps
            self.counts.output_tokens += plan.num_steps
            if sequence.num_left <= 0:
                finished.append(sequence)
        if finished:
            self._decoding = [sequence for sequence in self._decoding if sequence.num_left > 0]
        for sequence, num_tokens in plan.chunks:
            sequence.num_uncomputed -= num_tokens
            self._make_findable(sequence)
            if not sequence.num_uncomputed:
                self._prefilling.remove(sequence)
                self._prefilled(sequence, now, finished)
        for sequence in finished:
            sequence.ended_s = now
            self._release(sequence)
        self._begin(now)
        return finished

    def die(self, now: float) -> list[ModelledRequest]:
        """Lose everything; return the sequences that were here."""
        self._count_load(now)
        lost = [*self._waiting, *self._prefilling, *self._decoding]
        if (plan := self._plan) is not None:
            # Tokens of the steps that ended have reached their clients.
            num_steps = min(int((now - plan.begins_s) / plan.step_s), plan.num_steps)
            self.counts.busy_s += max(now - plan.begins_s, 0.0)
            for sequence in self._decoding:
                sequence.num_done = min(sequence.num_done + num_steps, sequence.request.output_length - 1)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._cache.clear()
        self._cores.num_busy -= self._plan is not None
        self._plan = None
        return lost

    def _count_load(self, now: float) -> None:
        self.counts.sequence_s += self.num_sequences * (now - self._changed_s)
        self._changed_s = now

    def _begin(self, now: float) -> None:
        """Plan the next steps; admit sequences while a step has room for their prompts."""
        costs, slowness = self._costs, self._cores.slowness
        decode_s = slowness * (costs.step_s + costs.row_s * len(self._decoding))
        room = self._prompt_tokens(decode_s) if self._prefilling or self._waiting else 0
        chunks = []
        for sequence in self._prefilling:
            if room <= 0:
                break
            chunks.append((sequence, min(sequence.num_uncomputed, room)))
            room -= chunks[-1][1]
        while room > 0 and self._waiting and len(self._decoding) + len(self._prefilling) < costs.rows:
            if not self._admit(self._waiting[0], now):
                break
            sequence = self._waiting.popleft()
            self._prefilling.append(sequence)
            chunks.append((sequence, min(sequence.num_uncomputed, room)))
            room -= chunks[-1][1]
        if not chunks and not self._decoding:
            self._plan = None
            self._cores.num_busy -= 1
            return
        step_s = decode_s + slowness * costs.token_s * sum(num_tokens for _, num_tokens in chunks)
        num_steps = 1 if chunks else min(sequence.num_left for sequence in self._decoding)
        self._plan = _EqualSteps(now, step_s, num_steps, chunks)

    def _prompt_tokens(self, decode_s: float) -> int:
        """Return the most prompt tokens of a step.

        It follows ``verifier_svc/scheduling/prefill_budget.py``.
        """
        costs = self._costs
        if not self._decoding or not costs.token_s or math.isinf(costs.limit_s):
            return costs.chunk_tokens
        room_s = max(costs.limit_s - decode_s, decode_s / 4)
        token_s = self._cores.slowness * costs.token_s
        return min(max(int(room_s / token_s), costs.chunk_tokens // 16, 16), costs.chunk_tokens)

    def _admit(self, sequence: ModelledRequest, now: float) -> bool:
        """Start a sequence if its blocks fit; look up its prefix."""
        request = sequence.request
        num_found = self._cache.start(self._prompt_blocks(request), self._num_private(request))
        if num_found is None:
            return False
        # The last token always runs.
        num_hits = min(num_found * self._block_tokens, request.input_length - 1)
        sequence.num_uncomputed = request.input_length - num_hits + sequence.num_done
        if math.isnan(sequence.queued_s):
            sequence.queued_s = now - request.at_s
        self.counts.prompt_tokens += request.input_length
        self.counts.hit_tokens += num_hits
        self.counts.num_requests += 1
        return True

    def _prefilled(self, sequence: ModelledRequest, now: float, finished: list[ModelledRequest]) -> None:
        """Count the token that a prompt's last step sampled."""
        if math.isnan(sequence.first_token_s):
            sequence.first_token_s = now - sequence.request.at_s
        elif not math.isnan(sequence.lost_at):
            sequence.pause_s = now - sequence.lost_at
        sequence.num_done += 1
        self.counts.output_tokens += 1
        if sequence.num_left <= 0:
            finished.append(sequence)
        else:
            self._decoding.append(sequence)

    def _make_findable(self, sequence: ModelledRequest) -> None:
        """Let the blocks of a prompt that are computed be found."""
        request = sequence.request
        num_computed = min(request.input_length + sequence.num_done - sequence.num_uncomputed, request.input_length)
        self._cache.compute(request.hash_ids[: num_computed // self._block_tokens])

    def _release(self, sequence: ModelledRequest) -> None:
        """Free a finished sequence's blocks."""
        request = sequence.request
        num_outputs = request.output_length // self._block_tokens
        self._cache.release(self._prompt_blocks(request), self._num_private(request), num_outputs)

    def _prompt_blocks(self, request: Request) -> tuple[int, ...]:
        """Return the prompt's whole blocks."""
        return request.hash_ids[: request.input_length // self._block_tokens]

    def _num_private(self, request: Request) -> int:
        """Return how many blocks a sequence needs beyond its prompt's whole ones."""
        whole = request.input_length // self._block_tokens
        return -(-(request.input_length + request.output_length) // self._block_tokens) - whole
