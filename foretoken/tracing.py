"""Pass trace context through the services, and export spans if that is configured.

W3C trace context is passed on as strings, unchanged. Without an endpoint there is no tracer, and
OpenTelemetry's tracing is not imported. Attributes are named by OpenTelemetry's GenAI conventions,
which are still in development, so the names appear only in this module.

A collector that is slow, refuses spans or is not there costs spans and one line in the log.
Requests never wait for it: spans wait in a bounded queue, and a thread sends them.
"""

from __future__ import annotations

import logging
import re
import shlex
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from foretoken import __version__
from foretoken.address import UNIX_PREFIX
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger(__name__)

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
# vLLM's names; seconds.
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"
# No convention covers speculation.
SPEC_DRAFTER = "spec.drafter"
SPEC_STEPS = "spec.steps"
SPEC_DRAFT_TOKENS = "spec.draft_tokens"
SPEC_ACCEPTED_TOKENS = "spec.accepted_tokens"
SPEC_FALLBACK_STEPS = "spec.fallback_steps"
SPEC_ACCEPTED_PER_POSITION = "spec.accepted_tokens_per_position"
SPEC_ROUNDS = "spec.rounds"
SPEC_TOKENS_SENT = "spec.tokens_sent"
SPEC_ALGORITHM = "spec.algorithm"
SPEC_TRANSPORT = "spec.transport"
# Seconds.
SPEC_DRAFT_TIME = "spec.draft_time"

Value = str | int | float | bool | list[str] | list[int]
Attributes = Mapping[str, Value]

# How long a stop waits for a collector that does not take the last spans.
FLUSH_TIMEOUT_S = 1.0
# The package that sends spans: the extra otlp.
_EXPORTER = "opentelemetry-exporter-otlp-proto-grpc"
MAX_TRACESTATE_CHARS = 512
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TraceContext(NamedTuple):
    """The two headers of W3C trace context, which name a span; ``traceparent`` is well formed."""

    traceparent: str
    tracestate: str | None = None

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]


def trace_context(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Return the context in these headers; None if it is missing or malformed."""
    if not traceparent or _TRACEPARENT.fullmatch(traceparent) is None:
        return None
    sound = bool(tracestate) and len(tracestate or "") <= MAX_TRACESTATE_CHARS and (tracestate or "").isascii()
    return TraceContext(traceparent, tracestate if sound and (tracestate or "").isprintable() else None)


class Span:
    """One running span."""

    def __init__(self, span: OtelSpan, context: TraceContext, tracer: Tracer) -> None:
        self._span, self._tracer = span, tracer
        self.context = context

    @property
    def is_recording(self) -> bool:
        """Return whether the span will be sent: its trace is sampled, and it has not ended."""
        return self._span.is_recording()

    def child(
        self, name: str, began_ns: int, ended_ns: int, attributes: Attributes, error: str | None = None
    ) -> TraceContext:
        """Record a child that is over, and return its context.

        ``began_ns``, ``ended_ns``: as time.time_ns(). ``error``: as for ``end``.
        """
        return self._tracer.record(name, self.context, began_ns, ended_ns, attributes, error)

    def end(self, attributes: Attributes, error: str | None = None, ended_ns: int | None = None) -> None:
        """End the span, now or at ``ended_ns``.

        ``error`` is the kind of failure, None after success.
        """
        if self._span.is_recording():
            self._span.set_attributes(dict(attributes))
            if error is not None:
                from opentelemetry.trace import StatusCode

                self._span.set_attribute(ERROR_TYPE, error)
                self._span.set_status(StatusCode.ERROR)
        self._span.end(ended_ns)


class Tracer:
    """Makes the spans of one service."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter) -> None:
        """``exporter`` receives the provider's spans."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("foretoken", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        *,
        kind: Literal["server", "internal"],
        began_ns: int | None = None,
    ) -> Span:
        """Start a span, now or at ``began_ns``; without a parent it starts a trace."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = Context()
        if parent is not None:
            headers = {"traceparent": parent.traceparent, "tracestate": parent.tracestate or ""}
            context = self._propagator.extract(headers, context)
        span = self._tracer.start_span(
            name,
            context,
            SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL,
            dict(attributes),
            start_time=began_ns,
        )
        own: dict[str, str] = {}
        self._propagator.inject(own, set_span_in_context(span, context))
        return Span(span, TraceContext(own["traceparent"], own.get("tracestate")), self)

    def record(
        self,
        name: str,
        parent: TraceContext,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
        error: str | None = None,
    ) -> TraceContext:
        """Record an internal span that is over, and return its context. See Span.child."""
        span = self.start(name, parent, attributes, kind="internal", began_ns=began_ns)
        span.end({}, error, ended_ns)
        return span.context

    def close(self) -> None:
        """Send the remaining spans. Blocks for FLUSH_TIMEOUT_S at most."""
        # The library's own flush retries each batch without bound.
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)
        if closing.is_alive():
            logger.warning("the collector did not take the last spans")
            self._exporter.shutdown()


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError as ``make_tracer`` does, without importing the exporter."""
    if endpoint is None:
        return
    url = urlsplit(endpoint)
    is_socket = endpoint.startswith(f"{UNIX_PREFIX}/")
    if not is_socket and (url.scheme not in ("http", "https") or not url.netloc):
        raise ConfigError(f"--otlp-traces-endpoint: expected http://host:port or unix:/path, got {endpoint!r}")
    try:
        # Importing it would load gRPC, which a supervisor does not need.
        version(_EXPORTER)
    except PackageNotFoundError:
        raise _no_exporter() from None


def _no_exporter() -> ConfigError:
    install = f"{shlex.quote(sys.executable)} -m pip install {_EXPORTER}"
    return ConfigError(f"--otlp-traces-endpoint needs another package: {install}")


def make_tracer(endpoint: str | None, service: str) -> Tracer | None:
    """Return a tracer that sends to a collector over OTLP and gRPC; None without an endpoint.

    ``endpoint``: http://host:port, https://host:port or unix:/path. OpenTelemetry's environment
    variables set headers, certificates, timeout and sampling. Raises ConfigError for another
    endpoint, or if the exporter is not installed.
    """
    if endpoint is None:
        return None
    check_endpoint(endpoint)
    try:
        from foretoken.span_exporter import CollectorExporter
    except ImportError as error:
        raise _no_exporter() from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"foretoken-{service}", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = CollectorExporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, exporter)
