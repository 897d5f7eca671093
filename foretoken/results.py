"""Define the result types of a sequence, which the verifier reports and the gateway passes on."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple


class FinishReason(enum.StrEnum):
    """Why an output ended, with OpenAI's values; clients see ABORT only after /abort_request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FallbackReason(enum.StrEnum):
    """Why a decode step had no draft although its request wanted one.

    The values are those in answers and metrics.
    """

    NO_DRAFTER = "no_drafter"  # none that the request may use is attached
    BATCH_LIMIT = "batch_limit"  # the batch is above --speculative-max-batch-size
    DRAFTS_DO_NOT_PAY = "drafts_do_not_pay"  # measured costs say that plain decode is faster now
    NOTHING_FOUND = "nothing_found"  # look-up drafters have, or lately had, nothing to propose
    # No drafter was asked yet: it has just joined, or overlapped steps began or ended.
    FIRST_STEP = "first_step"
    LAST_TOKEN = "last_token"  # only one more token may be emitted
    NO_DRAFT_IN_TIME = "no_draft_in_time"  # the drafter was late, failed, or is still catching up


class TokenLogprobs(NamedTuple):
    """Logprobs (natural log) of the raw target logits at one position.

    Attributes:
        rank: 1 for the most likely token.
        top: the most likely tokens with their logprobs, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class VerifiedTree(NamedTuple):
    """A draft tree that a step verified: one entry per node, the root first.

    Attributes:
        token_ids: the nodes' tokens; the root's is the last one before the step.
        parents: -1 for the root; below the node's own index for the others.
        sources: the drafter's number for each node; 0 for the root.
        accepted: the nodes whose tokens were accepted, from the root on.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[int, ...]
    accepted: tuple[int, ...]


class DrafterStats(NamedTuple):
    """Counts of one drafter; ``accepted_per_position[k]`` counts accepted tokens at depth k + 1."""

    name: str
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts of one sequence or a sum.

    Steps exclude prefill; tokens count before stop strings trim.
    """

    num_decode_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    fallback_steps: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    drafter: str = ""
    num_decode_tokens: int = 0
    drafters: tuple[DrafterStats, ...] = ()
    # By FallbackReason: the fallback steps that had it.
    fallback_reasons: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def sum(parts: Sequence[SpeculationStats]) -> SpeculationStats:
        """Return the sum of sequences, with the ``drafter`` of the one that drafted most."""
        histograms = zip_longest(*(part.acceptance_histogram for part in parts), fillvalue=0)
        busiest = max(parts, key=lambda part: part.num_draft_tokens, default=SpeculationStats())
        return SpeculationStats(
            num_decode_steps=sum(part.num_decode_steps for part in parts),
            num_spec_steps=sum(part.num_spec_steps for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
            fallback_steps=sum(part.fallback_steps for part in parts),
            acceptance_histogram=tuple(map(sum, histograms)),
            drafter=busiest.drafter,
            num_decode_tokens=sum(part.num_decode_tokens for part in parts),
            drafters=_sum_drafters([drafter for part in parts for drafter in part.drafters]),
            fallback_reasons=dict(sum((Counter(part.fallback_reasons) for part in parts), Counter())),
        )

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / steps that drafted; 1.0 if none drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0.0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens / decode steps, root-only steps included; 1.0 without steps."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 1.0


def _sum_drafters(parts: Sequence[DrafterStats]) -> tuple[DrafterStats, ...]:
    """Return one sum per drafter, in order of appearance."""
    sums: dict[str, DrafterStats] = {}
    for part in parts:
        known = sums.get(part.name, DrafterStats(part.name, 0, 0, ()))
        positions = zip_longest(known.accepted_per_position, part.accepted_per_position, fillvalue=0)
        sums[part.name] = DrafterStats(
            part.name,
            known.num_draft_tokens + part.num_draft_tokens,
            known.num_accepted_tokens + part.num_accepted_tokens,
            tuple(map(sum, positions)),
        )
    return tuple(sums.values())
