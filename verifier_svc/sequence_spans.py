"""Spans of sequences, made by the rim of what the last event says: the engine's step knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from foretoken import tracing
from foretoken.results import FinishReason
from foretoken.tracing import Span, TraceContext, Tracer
from verifier_svc.messages import ErrorEvent, Event, FinishedEvent, SequenceKey

SPAN_NAME = "sequence"
_STATUS_NAMES = {int(status.value[0]): status.name.lower() for status in grpc.StatusCode}


class SequenceSpans:
    """The open spans of one session."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[SequenceKey, Span] = {}
        # Aborted by a caller that has all it wanted: a stop string matched.
        self._satisfied: set[SequenceKey] = set()

    def start(self, key: SequenceKey, attempt: int, parent: TraceContext | None) -> None:
        """A sequence has arrived. One of the same key that still runs keeps its span: the newcomer is refused."""
        if key not in self._open:
            attributes: dict[str, tracing.Value] = {
                "foretoken.request_id": key.request_id,
                "foretoken.choice_index": key.choice_index,
                "foretoken.attempt": attempt,
            }
            self._open[key] = self._tracer.start(SPAN_NAME, parent, attributes, kind="internal")

    def satisfied(self, key: SequenceKey) -> None:
        """The caller is about to abort a sequence because it has all it wanted: that is no failure."""
        if key in self._open:
            self._satisfied.add(key)

    def end(self, events: Iterable[Event]) -> None:
        """Ends the spans of the sequences whose last event is among ``events``."""
        for event in events:
            if isinstance(event, FinishedEvent | ErrorEvent) and (span := self._open.pop(event.key, None)) is not None:
                is_satisfied = event.key in self._satisfied
                self._satisfied.discard(event.key)
                if isinstance(event, FinishedEvent):
                    aborted = event.reason is FinishReason.ABORT and not is_satisfied
                    span.end(_figures(event), "cancelled" if aborted else None)
                else:
                    span.end({}, _STATUS_NAMES.get(event.code, "unknown"))

    def close(self) -> None:
        """The session is over; what still runs is dropped."""
        for span in self._open.values():
            span.end({}, "cancelled")
        self._open.clear()


def _figures(event: FinishedEvent) -> tracing.Attributes:
    stats = event.speculation
    return {
        tracing.TIME_IN_QUEUE: event.queue_ms / 1e3,
        tracing.TIME_IN_PREFILL: event.prefill_ms / 1e3,
        tracing.TIME_IN_DECODE: event.decode_ms / 1e3,
        tracing.TIME_IN_INFERENCE: (event.prefill_ms + event.decode_ms) / 1e3,
        tracing.INPUT_TOKENS: event.num_prompt_tokens,
        tracing.OUTPUT_TOKENS: event.num_output_tokens,
        tracing.CACHED_INPUT_TOKENS: event.num_cached_tokens,
        tracing.SPEC_STEPS: stats.num_decode_steps,
        tracing.SPEC_DRAFT_TOKENS: stats.num_draft_tokens,
        tracing.SPEC_ACCEPTED_TOKENS: stats.num_accepted_tokens,
        tracing.SPEC_FALLBACK_STEPS: stats.fallback_steps,
        tracing.SPEC_DRAFTER: stats.drafter,
    }
