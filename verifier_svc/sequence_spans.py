"""Record the tracing spans of each sequence.

They are the whole, its queue, prefill and decode, and its drafters.

The service builds spans from a sequence's last event, so the engine's steps do no tracing work. A
drafter in a process of its own adds a span of its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import grpc

from foretoken import tracing
from foretoken.results import DrafterStats, FinishReason
from foretoken.tracing import Span, TraceContext, Tracer
from verifier_svc.messages import ErrorEvent, Event, FinishedEvent, SequenceKey

SPAN_NAME = "sequence"
QUEUE, PREFILL, DECODE, SPECULATE = "queue", "prefill", "decode", "speculate"
# Called with a drafter's name, the batch slot and generation of a sequence that has ended, and the
# parent of the drafter's span.
DrafterTrace = Callable[[str, int, int, TraceContext], None]
_STATUS_NAMES = {int(status.value[0]): status.name.lower() for status in grpc.StatusCode}


class SequenceSpans:
    """The open spans of one session."""

    def __init__(self, tracer: Tracer, trace_drafter: DrafterTrace) -> None:
        self._tracer, self._trace_drafter = tracer, trace_drafter
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
                    self._finish(span, event, "cancelled" if aborted else None)
                else:
                    span.end({}, _STATUS_NAMES.get(event.code, "unknown"))

    def _finish(self, span: Span, event: FinishedEvent, error: str | None) -> None:
        """End a sequence's span, and record its children."""
        ended_ns = time.time_ns()
        if span.is_recording:
            _record_phases(self._tracer, span, event, ended_ns)
            for drafter in event.speculation.drafters:
                self._trace_drafter(drafter.name, event.batch_slot, event.generation, span.context)
        span.end(_figures(event), error, ended_ns)

    def close(self) -> None:
        """End all open spans as cancelled: the session is over."""
        for span in self._open.values():
            span.end({}, "cancelled")
        self._open.clear()


def _record_phases(tracer: Tracer, span: Span, event: FinishedEvent, ended_ns: int) -> None:
    """Record queue, prefill and decode, which end at ``ended_ns``, and what each drafter gave.

    A phase that the sequence never reached has no span.
    """
    began_ns = ended_ns - _ns(event.queue_ms + event.prefill_ms + event.decode_ms)
    phases = {QUEUE: event.queue_ms, PREFILL: event.prefill_ms, DECODE: event.decode_ms}
    for name, milliseconds in phases.items():
        phase_ended_ns = began_ns + _ns(milliseconds)
        if milliseconds > 0:
            parent = tracer.record(name, span.context, began_ns, phase_ended_ns, {})
            for drafter in event.speculation.drafters if name == DECODE else ():
                tracer.record(SPECULATE, parent, began_ns, phase_ended_ns, _share(drafter))
        began_ns = phase_ended_ns


def _share(drafter: DrafterStats) -> tracing.Attributes:
    return {
        tracing.SPEC_DRAFTER: drafter.name,
        tracing.SPEC_DRAFT_TOKENS: drafter.num_draft_tokens,
        tracing.SPEC_ACCEPTED_TOKENS: drafter.num_accepted_tokens,
        tracing.SPEC_ACCEPTED_PER_POSITION: list(drafter.accepted_per_position),
    }


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


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
