"""A collector that is not there, comes late or refuses costs spans and one line, never more."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from foretoken.span_exporter import CollectorExporter
from tests.support.collector import Collector, collecting


class Spans:
    """A tracer whose spans are exported when they end."""

    def __init__(self, exporter: CollectorExporter) -> None:
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))

    def make(self, name: str) -> None:
        self._provider.get_tracer("test").start_span(name).end()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.levelno >= logging.INFO]


def test_a_socket_that_does_not_exist_takes_spans_once_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = f"unix:{tmp_path}/otlp.sock"
    exporter = CollectorExporter(address)
    spans = Spans(exporter)
    spans.make("early")
    with collecting(address) as collector:
        spans.make("late")
        assert [span.name for span in collector.spans(1)] == ["late"]
    exporter.shutdown()
    assert lines(caplog) == []


class Refusing(Collector):
    """Refuses spans as a collector without room does, for as long as the test says."""

    refuses = True

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")
        return super().Export(request, context)


def test_a_collector_that_refuses_is_one_line_until_it_takes_spans_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with collecting(collector=Refusing()) as collector:
        assert isinstance(collector, Refusing)
        exporter = CollectorExporter(collector.endpoint)
        spans = Spans(exporter)
        for _ in range(3):
            spans.make("refused")
        refused = ("WARNING", f"the collector at {collector.endpoint} takes no spans; they are dropped until it does")
        assert lines(caplog) == [refused]
        collector.refuses = False
        spans.make("taken")
        assert [span.name for span in collector.spans(1)] == ["taken"]
        assert lines(caplog) == [refused, ("INFO", f"the collector at {collector.endpoint} takes spans again")]
        collector.refuses = True
        spans.make("refused again")
        assert lines(caplog)[2:] == [refused]
        exporter.shutdown()


def test_a_missing_socket_is_no_success(tmp_path: Path) -> None:
    exporter = CollectorExporter(f"unix:{tmp_path}/none.sock")
    assert exporter.export([]) is SpanExportResult.FAILURE
    exporter.shutdown()
