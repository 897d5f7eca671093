"""The plain values that pass between the service (service.py) and the engine.

Sequences and their ends go down through the inbox, as do changes of drafters (drafters/changes.py). The events of a
step go up, each session's into its outbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs
from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.sampling.grammar import Matcher


class SequenceKey(NamedTuple):
    """Identity of a sequence within a verifier: its session, its request and its choice."""

    session_id: int
    request_id: str
    choice_index: int


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to run. Already checked against foretoken.limits by the service."""

    key: SequenceKey
    # 0 at first; each resume on this or another verifier counts one more.
    attempt: int
    prompt_ids: tuple[int, ...]
    # Output of earlier attempts; generation goes on behind it.
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    cache_salt: str | None
    # time.monotonic() seconds; None: no deadline.
    deadline: float | None
    # Behind ``output_ids`` in the sampling's grammar, if it has one; the engine's own from now on.
    matcher: Matcher | None = None
    # Tokens that the client expects as the output: a draft.
    prediction_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence; an unknown key is ignored, since it may just have ended by itself."""

    key: SequenceKey
    kept_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Abort whatever the session still runs, without events."""

    session_id: int


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """New output tokens of one sequence, from index ``offset`` of its output on."""

    key: SequenceKey
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    # 0: sampled by the target; k: accepted draft of the k-th configured drafter.
    sources: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Prompt tokens that the prefix cache held; only beside the first tokens.
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a sequence that ended well. Times are milliseconds."""

    key: SequenceKey
    attempt: int
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats
    stop_token_id: int | None
    queue_ms: float
    prefill_ms: float
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a sequence that failed; ``code`` is a google.rpc.Code."""

    key: SequenceKey
    attempt: int
    code: int
    message: str
    field: str


Event = TokensEvent | FinishedEvent | ErrorEvent
