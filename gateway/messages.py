"""Plain values that gateway and verifier exchange. Nothing here knows protobuf, text or HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from foretoken.errors import ForetokenError
from foretoken.limits import ModelLimits
from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs, VerifiedTree
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tracing import TraceContext


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one sequence. Times are milliseconds."""

    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    stop_token_id: int | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One choice of one request, as submitted; ``output_ids`` come from earlier attempts."""

    request_id: str
    choice_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    cache_salt: str | None = None
    timeout_ms: int | None = None
    # The parent of its spans.
    trace: TraceContext | None = None
    attempt: int = 0
    output_ids: tuple[int, ...] = ()
    # The output that the client expects.
    prediction_ids: tuple[int, ...] = ()
    # Lower numbers start first.
    priority: int = 0
    # Whether its tokens come with the trees that its steps verify.
    returns_trees: bool = False
    # The model that produced the output so far; a verifier with another model refuses.
    model_fingerprint: str | None = None


class VerifierLoad(NamedTuple):
    """What a verifier has to do, for all gateways, as it last reported."""

    num_running: int
    num_waiting: int
    # Sequences that run at once at most.
    max_running: int
    num_blocks: int
    num_free_blocks: int


class NewTokens(NamedTuple):
    """The next tokens of one sequence; ``sources`` has one entry per token."""

    ids: tuple[int, ...]
    sources: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Prompt tokens found in the prefix cache; only with the first tokens of an attempt.
    num_cached_tokens: int | None = None
    # The newest draft tree that was verified for these tokens, if requested.
    tree: VerifiedTree | None = None


class OutputSink(Protocol):
    """Receives the output of one sequence, on the event loop.

    Nothing follows an end or an error.
    """

    def on_tokens(self, tokens: NewTokens) -> None:
        """Receive new tokens, in order, each once."""
        ...

    def on_waiting(self) -> None:
        """Learn that the sequence waits until a verifier is up."""
        ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_error(self, error: ForetokenError) -> None: ...


class SequenceSink(Protocol):
    """Receives the events of one attempt on one verifier, on the event loop."""

    def on_tokens(self, tokens: NewTokens) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_error(self, error: ForetokenError) -> None: ...

    def on_refused(self, reason: str) -> None:
        """Learn that the verifier refused the sequence, because it takes no more."""
        ...

    def on_lost(self, reason: str) -> None:
        """Learn that the session broke and the sequence was lost."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One configured drafter as the verifier sees it; counts start with the verifier."""

    name: str
    algorithm: str
    transport: str
    # Empty: it runs in the verifier's process.
    address: str
    state: str
    # Why it is not attached, if the verifier knows.
    reason: str
    num_attaches: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rejected_drafts: int
    accepted_per_position: tuple[int, ...]
    # Draft requests that a step waited for, and microseconds of these waits.
    num_awaited: int = 0
    wait_us: int = 0
    # Whether hardly any of its last drafts had an accepted token, or half as many as usual.
    has_low_acceptance: bool = False
    # Figures that the drafter reports.
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """The answer of GetInfo: the model, and the verifier's gauges and counters."""

    version: str
    epoch: int
    model_name: str
    model_fingerprint: str
    device: str
    dtype: str
    mode: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    max_queue: int
    num_steps: int
    num_preemptions: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_plain_batch_steps: int
    num_fallback_steps: int
    speculative_max_batch_size: int
    step_time_us: Mapping[str, int]
    overlap_blocked_steps: Mapping[str, int]
    fallback_reasons: Mapping[str, int]
    drafters: tuple[DrafterInfo, ...]

    @property
    def limits(self) -> ModelLimits:
        """The limits that requests are checked against."""
        names = tuple(drafter.name for drafter in self.drafters)
        detached = tuple(drafter.name for drafter in self.drafters if drafter.state == "detached")
        return ModelLimits(self.vocab_size, self.max_model_len, names, detached)

    def drafter_name(self, number: int) -> str | None:
        """Return the name of a drafter by its number in sources; None for 0, the target.

        Another verifier may have given the number to another drafter.
        """
        if number == 0:
            return None
        # A drafter that another gateway attached may not be known here yet.
        return self.drafters[number - 1].name if number <= len(self.drafters) else f"drafter {number}"
