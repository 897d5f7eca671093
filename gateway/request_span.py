"""Trace one request at the gateway: parameters at its start, figures at its end, never its text."""

from __future__ import annotations

import dataclasses
import time

from foretoken import tracing
from foretoken.errors import ForetokenError
from foretoken.tracing import Span, TraceContext, Tracer
from gateway.generation import Generation
from gateway.generation_request import GenerationRequest
from gateway.output import Output

PROVIDER_NAME = "foretoken"


def start_span(
    tracer: Tracer | None, request: GenerationRequest, model: str, api: str, client_id: str
) -> tuple[Span | None, GenerationRequest]:
    """Start the request's span; return it with the request as its child. No tracer, no span."""
    if tracer is None:
        return None, request
    attributes = _common(api, model, client_id) | _parameters(request)
    span = tracer.start(_name(api, model), request.trace, attributes, kind="server")
    return span, dataclasses.replace(request, trace=span.context)


def end_span(span: Span, generation: Generation, failure: str | None) -> None:
    """End a request's span; ``failure`` as in the log, None for a request that finished."""
    stats = generation.speculation
    attributes: dict[str, tracing.Value] = {
        tracing.INPUT_TOKENS: generation.prompt_tokens,
        tracing.OUTPUT_TOKENS: generation.completion_tokens,
        tracing.CACHED_INPUT_TOKENS: generation.cached_tokens,
        tracing.RESPONSE_FINISH_REASONS: [o.finish_reason.value for o in generation.outputs if o.finish_reason],
        tracing.SPEC_STEPS: stats.num_decode_steps,
        tracing.SPEC_DRAFT_TOKENS: stats.num_draft_tokens,
        tracing.SPEC_ACCEPTED_TOKENS: stats.num_accepted_tokens,
        tracing.SPEC_FALLBACK_STEPS: stats.fallback_steps,
        tracing.SPEC_DRAFTER: stats.drafter,
        "foretoken.resumes": generation.num_resumes,
    }
    if (first_s := generation.time_to_first_token_s) is not None:
        attributes[tracing.RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
    ended_ns = time.time_ns()
    if span.is_recording:
        for output in generation.outputs:
            _record_pauses(span, output, ended_ns, failure)
    span.end(attributes, failure, ended_ns)


def _record_pauses(span: Span, output: Output, ended_ns: int, failure: str | None) -> None:
    """Record when an output had no verifier.

    A pause that goes on at ``ended_ns`` ended with ``failure``.
    """
    for pause in output.sequence.pauses.all if output.sequence is not None else ():
        attributes: dict[str, tracing.Value] = {
            "foretoken.choice_index": output.spec.choice_index,
            "foretoken.reason": pause.reason,
            "foretoken.verifier": pause.verifier,
        }
        error = failure if pause.ended_ns is None else None
        span.child(pause.name, pause.began_ns, pause.ended_ns or ended_ns, attributes, error)


def refused_span(
    tracer: Tracer | None,
    error: ForetokenError,
    parent: TraceContext | None,
    model: str,
    api: str,
    client_id: str,
) -> TraceContext | None:
    """Trace a refused request; return its span's context."""
    if tracer is None:
        return parent
    span = tracer.start(_name(api, model), parent, _common(api, model, client_id), kind="server")
    span.end({}, error.status.name.lower())
    return span.context


def _name(api: str, model: str) -> str:
    return f"{_operation(api)} {model}"


def _operation(api: str) -> str:
    """Return the convention's name for the operation."""
    return "chat" if api.endswith("/chat/completions") else "text_completion"


def _common(api: str, model: str, client_id: str) -> dict[str, tracing.Value]:
    attributes: dict[str, tracing.Value] = {
        tracing.OPERATION: _operation(api),
        tracing.PROVIDER: PROVIDER_NAME,
        tracing.REQUEST_MODEL: model,
        "foretoken.api": api,
    }
    if client_id:
        attributes["foretoken.client_request_id"] = client_id
    return attributes


def _parameters(request: GenerationRequest) -> dict[str, tracing.Value]:
    sampling = request.sampling
    attributes: dict[str, tracing.Value] = {
        tracing.RESPONSE_ID: request.id,
        tracing.REQUEST_MAX_TOKENS: sampling.max_tokens,
        tracing.REQUEST_TEMPERATURE: sampling.temperature,
        tracing.REQUEST_TOP_P: sampling.top_p,
        tracing.REQUEST_TOP_K: sampling.top_k,
        tracing.REQUEST_CHOICE_COUNT: request.n,
    }
    # An attribute cannot hold 2^63 or more.
    if sampling.seed < 2**63:
        attributes[tracing.REQUEST_SEED] = sampling.seed
    return attributes
