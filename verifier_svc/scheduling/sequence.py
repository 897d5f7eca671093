"""Hold the state of a sequence, one choice of one request: tokens, blocks, statistics."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from foretoken.results import DrafterStats, FallbackReason, SpeculationStats, TokenLogprobs
from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.sampling.verify import SamplingState
from verifier_svc.scheduling.block_manager import BlockTable
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.hidden_states import HiddenStates

NO_BATCH_SLOT = -1


class DecodeStep(NamedTuple):
    """One sequence's figures of one decode step. ``num_emitted``: tokens before trimming."""

    num_emitted: int
    # One share for each drafter with nodes in the tree.
    shares: tuple[DrafterShare, ...]
    # Why it had no draft; None if it had one, or none was wanted.
    fallback: FallbackReason | None

    @property
    def num_drafted(self) -> int:
        return sum(share.num_drafted for share in self.shares)

    @property
    def num_accepted(self) -> int:
        return sum(len(share.accepted_depths) for share in self.shares)


@dataclass(slots=True)
class Times:
    """Hold the times of a sequence's phases, in seconds of time.monotonic()."""

    arrived_at: float
    # When it first ran, and when its first token was sampled.
    started_at: float | None = None
    first_token_at: float | None = None

    def phases_ms(self, now: float) -> tuple[float, float, float]:
        """Return the milliseconds of queue, prefill and decode. ``now`` ends the current phase."""
        started = self.started_at if self.started_at is not None else now
        first_token = self.first_token_at if self.first_token_at is not None else now
        return (started - self.arrived_at) * 1e3, (first_token - started) * 1e3, (now - first_token) * 1e3


@dataclass(slots=True)
class PromptLogprobs:
    """Collect the prompt's logprobs until they are sent."""

    are_sent: bool
    entries: list[TokenLogprobs] = field(default_factory=list)

    @property
    def unsent(self) -> tuple[TokenLogprobs, ...]:
        return () if self.are_sent else tuple(self.entries)


class Sequence:
    """One choice of one request. Only the engine thread uses it."""

    def __init__(
        self, submit: Submit, *, max_model_len: int, eos_ids: frozenset[int], token_limit: int, now: float
    ) -> None:
        """
        Args:
            max_model_len: most tokens of prompt and output together.
            eos_ids: ids of the tokens that end an output.
            token_limit: ids from this one up are never sampled.
            now: seconds of time.monotonic(), like the deadline.
        """
        self.submission = submit
        self.key: SequenceKey = submit.key
        self.sampling: SamplingParams = submit.sampling
        self.speculation: SpeculationOptions = submit.speculation
        self.salt_digest = digest_of_salt(submit.cache_salt)
        self.deadline = submit.deadline
        # Committed tokens: prompt, then output. The last one is the root of the next tree.
        self.tokens: list[int] = [*submit.prompt_ids, *submit.output_ids]
        self.num_prompt_tokens = len(submit.prompt_ids)
        # Output tokens of earlier attempts. This attempt does not emit them again.
        self.num_resumed_tokens = len(submit.output_ids)
        self.max_len = min(self.num_prompt_tokens + submit.sampling.max_tokens, max_model_len)
        self.sampler = SamplingState(
            submit.sampling,
            submit.prompt_ids,
            submit.output_ids,
            eos_ids=eos_ids,
            choice_index=submit.key.choice_index,
            vocab_limit=token_limit,
            matcher=submit.matcher,
        )
        self.times = Times(arrived_at=now)

        # Cache: the blocks of ``table`` hold the KV entries of tokens [0, num_computed).
        self.table: BlockTable | None = None
        self.num_computed = 0
        self.num_cached_tokens: int | None = None
        # The batch slot, and how many sequences it has had.
        self.batch_slot = NO_BATCH_SLOT
        self.generation = 0

        # Speculation: hidden states for the drafters, and the figures of each decode step.
        self.hidden_states = HiddenStates()
        self.steps: list[DecodeStep] = []

        # The first attempt has sent a resumed sequence's prompt logprobs.
        self.prompt_logprobs = PromptLogprobs(are_sent=self.num_resumed_tokens > 0)

    @property
    def block_ids(self) -> list[int]:
        """Return the KV blocks in logical order. The sequence must be running."""
        assert self.table is not None
        return self.table.block_ids

    @property
    def choice_index(self) -> int:
        return self.key.choice_index

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def max_new_tokens(self) -> int:
        """Return how many tokens may still follow before ``max_tokens`` or the context's end."""
        return self.max_len - len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Return how many tokens must run before the next can be sampled; 1 in decode: the root."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Return whether the sequence's next step is a decode step, which may verify a tree."""
        return self.num_uncomputed == 1 and self.num_output_tokens > self.num_resumed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.prompt_logprobs.are_sent

    def forget_cache(self) -> None:
        """Forget blocks, batch slot and computed tokens after a preemption; all run again."""
        self.table = None
        self.num_computed = 0
        self.batch_slot = NO_BATCH_SLOT
        self.hidden_states.clear()
        self.prompt_logprobs.entries.clear()

    def stats(self, drafter_names: tuple[str, ...], kept_tokens: int | None = None) -> SpeculationStats:
        """Return the statistics of the decode steps.

        Args:
            drafter_names: names by drafter number - 1.
            kept_tokens: output tokens that the client keeps; later steps do not count. None: all
                do.
        """
        steps = self.steps
        if kept_tokens is not None:
            # Prefill samples the first token, which belongs to no decode step.
            left = kept_tokens - self.num_resumed_tokens - 1
            count = 0
            while count < len(steps) and left > 0:
                left -= steps[count].num_emitted
                count += 1
            steps = steps[:count]
        drafted = [step for step in steps if step.num_drafted]
        reasons = Counter(step.fallback for step in steps if step.fallback is not None)
        histogram = [0] * (1 + max((step.num_drafted for step in drafted), default=-1))
        for step in drafted:
            histogram[step.num_accepted] += 1
        by_drafter = _by_drafter(drafted, drafter_names)
        most = max(by_drafter, key=lambda stats: stats.num_draft_tokens, default=None)
        return SpeculationStats(
            num_decode_steps=len(steps),
            num_spec_steps=len(drafted),
            num_draft_tokens=sum(step.num_drafted for step in drafted),
            num_accepted_tokens=sum(step.num_accepted for step in drafted),
            fallback_steps=sum(reasons.values()),
            acceptance_histogram=tuple(histogram),
            drafter=most.name if most else "",
            drafters=by_drafter,
            num_decode_tokens=sum(step.num_emitted for step in steps),
            fallback_reasons={reason.value: count for reason, count in reasons.items()},
        )


def _by_drafter(steps: list[DecodeStep], names: tuple[str, ...]) -> tuple[DrafterStats, ...]:
    """Return the drafted and accepted nodes of each drafter, in the drafters' order."""
    drafted: dict[int, int] = {}
    positions: dict[int, list[int]] = {}
    for step in steps:
        for share in step.shares:
            drafted[share.drafter] = drafted.get(share.drafter, 0) + share.num_drafted
            counts = positions.setdefault(share.drafter, [])
            counts.extend([0] * (max(share.accepted_depths, default=0) - len(counts)))
            for depth in share.accepted_depths:
                counts[depth - 1] += 1
    return tuple(
        DrafterStats(names[drafter - 1], drafted[drafter], sum(positions[drafter]), tuple(positions[drafter]))
        for drafter in sorted(drafted)
    )


def digest_of_salt(salt: str | None) -> int:
    """Return 64 bits that identify a tenant to drafters; 0 is the default tenant."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1
