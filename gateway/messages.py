"""What the verifier tells the gateway, as plain values. Nothing here knows protobuf, text or HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.errors import ForetokenError
from foretoken.limits import ModelLimits
from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs
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
    """One choice of one request, as it is submitted. ``output_ids`` are the tokens of earlier attempts."""

    request_id: str
    choice_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    cache_salt: str | None = None
    timeout_ms: int | None = None
    # The span that it belongs to.
    trace: TraceContext | None = None
    attempt: int = 0
    output_ids: tuple[int, ...] = ()
    # What the client expects as the output.
    prediction_ids: tuple[int, ...] = ()
    # Of the verifier that the output so far came from; another one refuses.
    model_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sequence that follow those before. ``sources`` has one entry a token."""

    ids: tuple[int, ...]
    sources: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Prompt tokens that the prefix cache held; only beside the first tokens of an attempt.
    num_cached_tokens: int | None = None


class OutputSink(Protocol):
    """Takes what becomes of one sequence, called on the event loop. After an end nothing more comes."""

    def on_tokens(self, tokens: NewTokens) -> None:
        """New tokens in order, none twice."""
        ...

    def on_waiting(self) -> None:
        """No verifier is there; tokens come when one is."""
        ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_error(self, error: ForetokenError) -> None: ...


class SequenceSink(Protocol):
    """Takes the events of one attempt at a sequence on one verifier, called on the event loop."""

    def on_tokens(self, tokens: NewTokens) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_error(self, error: ForetokenError) -> None: ...

    def on_refused(self, reason: str) -> None:
        """The verifier takes no sequences any more; nothing came of this one."""
        ...

    def on_lost(self, reason: str) -> None:
        """The session broke, and the sequence with it."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One configured drafter as the verifier sees it; counts since the verifier's start."""

    name: str
    algorithm: str
    transport: str
    # Where it listens; empty: in the verifier's process.
    address: str
    state: str
    # Why it is not attached, as far as the verifier knows.
    reason: str
    num_attaches: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_rejected_drafts: int
    accepted_per_position: tuple[int, ...]
    # Requests that a step waited for, and microseconds of these waits.
    num_awaited: int = 0
    wait_us: int = 0
    # The drafter's own figures.
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """GetInfo: the model and the verifier's gauges and counters."""

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
    drafters: tuple[DrafterInfo, ...]

    @property
    def limits(self) -> ModelLimits:
        """What requests are checked against."""
        names = tuple(drafter.name for drafter in self.drafters)
        detached = tuple(drafter.name for drafter in self.drafters if drafter.state == "detached")
        return ModelLimits(self.vocab_size, self.max_model_len, names, detached)
