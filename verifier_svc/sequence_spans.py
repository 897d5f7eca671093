"""Record a tracing span for each sequence.

The service builds spans from a sequence's last event, so the engine's steps do no tracing work.
"""

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
        # Sequences whose caller aborts them because a stop string matched.
        self._satisfied: set[SequenceKey] = set()

    def start(self, key: SequenceKey, attempt: int, parent: TraceContext | None) -> None:
        """Start a sequence's span.

        If a sequence with this key still runs, it keeps its span: the engine refuses the new one.
        """
        if key not in self._open:
            attributes: dict[str, tracing.Value] = {
                "foretoken.request_id": key.request_id,
                "foretoken.choice_index": key.choice_index,
                "foretoken.attempt": attempt,
            }
            self._open[key] = self._tracer.start(SPAN_NAME, parent, attributes, kind="internal")

    def satisfied(self, key: SequenceKey) -> None:
        """Mark a sequence whose caller aborts it because it is complete: that is no failure."""
        if key in self._open:
            self._satisfied.add(key)

    def end(self, events: Iterable[Event]) -> None:
        """End the spans of the sequences whose last event is among ``events``."""
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
        """End all open spans as cancelled: the session is over."""
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
