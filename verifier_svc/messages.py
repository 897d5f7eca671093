"""Define the plain values that the service (service.py) and the engine exchange.

The service sends submissions, aborts, flushes and drafter changes (drafters/changes.py) through the
inbox.
The engine puts a step's events into the outbox of each session.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs, VerifiedTree
from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.sampling.grammar import Matcher


class SequenceKey(NamedTuple):
    """A sequence's identity within a verifier: its session, request and choice."""

    session_id: int
    request_id: str
    choice_index: int


@dataclass(frozen=True, slots=True)
class Submit:
    """A sequence to run. The service has checked it against foretoken.limits."""

    key: SequenceKey
    # 0 at first. Each resume, on this or another verifier, adds one.
    attempt: int
    prompt_ids: tuple[int, ...]
    # Output of earlier attempts. Generation continues after it.
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    cache_salt: str | None
    # time.monotonic() seconds; None: no deadline.
    deadline: float | None
    # If there is a grammar: its state after ``output_ids``. The engine owns it from now on.
    matcher: Matcher | None = None
    # The output that the client predicts, used as a draft.
    prediction_ids: tuple[int, ...] = ()
    # Lower numbers start first and are preempted last.
    priority: int = 0
    # Whether its events carry the trees that its steps verify.
    returns_trees: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence. The engine ignores an unknown key: the sequence may just have ended."""

    key: SequenceKey
    kept_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Abort all sequences of a session without events."""

    session_id: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Empty the prefix cache. ``done`` gets the blocks that it had, or PreconditionError."""

    done: Future[int]


class TokensEvent(NamedTuple):
    """New output tokens of one sequence. The first one has index ``offset`` in its output.

    A named tuple, since each step makes one for each sequence: a dataclass takes longer to make.
    """

    key: SequenceKey
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    # For each token: 0 if the target sampled it, k if the k-th configured drafter drafted it.
    sources: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # Prompt tokens found in the prefix cache; set only with the first tokens.
    num_cached_tokens: int | None = None
    # The newest draft tree that was verified for these tokens, if requested.
    tree: VerifiedTree | None = None


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a sequence that ended without an error. Times are in milliseconds."""

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
    # The batch slot that it had last, and which of its sequences this was; -1: it had none.
    batch_slot: int = -1
    generation: int = 0


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a sequence that failed; ``code`` is a google.rpc.Code."""

    key: SequenceKey
    attempt: int
    code: int
    message: str
    field: str


Event = TokensEvent | FinishedEvent | ErrorEvent
