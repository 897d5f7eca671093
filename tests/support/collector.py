"""A collector of spans: OTLP's TraceService on a real gRPC port, which decodes what arrives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    is_error: bool
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]

    @property
    def duration_s(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A trace service that keeps every span."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._arrived = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._arrived:
            for resource in request.resource_spans:
                service = {item.key: _value(item.value) for item in resource.resource.attributes}["service.name"]
                self._spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, count: int, name: str | None = None) -> list[ReceivedSpan]:
        """Return all spans so far, once there are ``count``, or as many of this name."""

        def found() -> int:
            return sum(name in (None, span.name) for span in self._spans)

        with self._arrived:
            self._arrived.wait_for(lambda: found() >= count)
            return list(self._spans)


@contextlib.contextmanager
def collecting(address: str = "127.0.0.1:0", collector: Collector | None = None) -> Iterator[Collector]:
    """Run a collector that listens at ``endpoint``: at ``address``, host:port or unix:/path."""
    collector = collector or Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port(address)
    collector.endpoint = address if address.startswith("unix:") else f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _span(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        kind=span.kind,
        is_error=span.status.code == 2,
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes={item.key: _value(item.value) for item in span.attributes},
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
