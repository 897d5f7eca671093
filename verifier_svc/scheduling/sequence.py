"""A sequence: one choice of one request while it runs, and what follows from it.

It holds its tokens, its place in the cache and its statistics; it decides nothing.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from foretoken.results import DrafterStats, SpeculationStats, TokenLogprobs
from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.sampling.verify import SamplingState
from verifier_svc.scheduling.block_manager import BlockTable
from verifier_svc.scheduling.draft import DrafterShare
from verifier_svc.scheduling.hidden_states import HiddenStates

NO_SLOT = -1


class DecodeStep(NamedTuple):
    """What one decode step did for one sequence. ``num_emitted`` is counted before trimming."""

    num_emitted: int
    # One for each drafter that had nodes in the tree.
    shares: tuple[DrafterShare, ...]
    # Whether drafts were wanted.
    wanted: bool

    @property
    def num_drafted(self) -> int:
        return sum(share.num_drafted for share in self.shares)

    @property
    def num_accepted(self) -> int:
        return sum(len(share.accepted_depths) for share in self.shares)


class Sequence:  # large: all the state of one sequence; it decides nothing
    """One choice of one request. Only the engine thread touches it."""

    def __init__(
        self, submit: Submit, *, max_model_len: int, eos_ids: frozenset[int], token_limit: int, now: float
    ) -> None:
        """``now`` and the deadline are time.monotonic() seconds; ids from ``token_limit`` on are never sampled."""
        self.key: SequenceKey = submit.key
        self.attempt = submit.attempt
        self.sampling: SamplingParams = submit.sampling
        self.speculation: SpeculationOptions = submit.speculation
        self.cache_salt = submit.cache_salt
        self.salt_digest = digest_of_salt(submit.cache_salt)
        self.deadline = submit.deadline
        # Committed tokens: prompt, then output. The last one is the root of the next tree.
        self.tokens: list[int] = [*submit.prompt_ids, *submit.output_ids]
        self.num_prompt_tokens = len(submit.prompt_ids)
        # Output tokens that earlier attempts emitted. They are neither decoded nor emitted again.
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
        self.arrived_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None

        # Cache: tokens [0, num_computed) have their keys and values in the blocks of ``table``.
        self.table: BlockTable | None = None
        self.num_computed = 0
        self.num_cached_tokens: int | None = None
        # The batch slot, and how many sequences it has had.
        self.slot = NO_SLOT
        self.generation = 0

        # Speculation: the hidden states that drafters want, and what drafting came to.
        self.hidden_states = HiddenStates()
        self.prediction_ids = submit.prediction_ids
        self.steps: list[DecodeStep] = []

        self.prompt_logprobs: list[TokenLogprobs] = []
        # A resumed sequence's were sent by the first attempt.
        self.prompt_logprobs_sent = self.num_resumed_tokens > 0

    @property
    def block_ids(self) -> list[int]:
        """KV blocks in logical order. Only while the sequence runs."""
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
        """Output tokens that may still come before ``max_tokens`` or the end of the context."""
        return self.max_len - len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next one can be sampled; 1 in plain decode: the root."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next step of this sequence is a decode step, so that it may verify a tree."""
        return self.num_uncomputed == 1 and self.num_output_tokens > self.num_resumed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_sent

    def forget_cache(self) -> None:
        """Compute everything again, after a preemption."""
        self.table = None
        self.num_computed = 0
        self.slot = NO_SLOT
        self.hidden_states.clear()
        self.prompt_logprobs = []

    def stats(self, drafter_names: tuple[str, ...], kept_tokens: int | None = None) -> SpeculationStats:
        """Return the statistics of the decode steps up to output token ``kept_tokens`` (all if None)."""
        steps = self.steps
        if kept_tokens is not None:
            # The token that prefill sampled belongs to no decode step.
            left = kept_tokens - self.num_resumed_tokens - 1
            count = 0
            while count < len(steps) and left > 0:
                left -= steps[count].num_emitted
                count += 1
            steps = steps[:count]
        drafted = [step for step in steps if step.num_drafted]
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
            fallback_steps=sum(step.wanted and not step.num_drafted for step in steps),
            acceptance_histogram=tuple(histogram),
            drafter=most.name if most else "",
            drafters=by_drafter,
            num_decode_tokens=sum(step.num_emitted for step in steps),
        )


def _by_drafter(steps: list[DecodeStep], names: tuple[str, ...]) -> tuple[DrafterStats, ...]:
    """Return what became of each drafter's nodes, in the order of the drafters."""
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
    """Return 64 bits by which drafters know a tenant; 0 is the default tenant."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1
