"""Metrics and logs of a service. The only module that knows which library exports metrics.

Names of metrics are Prometheus names without the ``_total`` that counters get at export.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

PREFIX = "foretoken_"
EXPOSITION_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Labels = Mapping[str, str]
# Values of one metric at scrape time, one for each set of labels.
Samples = Callable[[], Iterable[tuple[float, Labels]]]

_STANDARD_LOG_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Counter(Protocol):
    def add(self, amount: float, labels: Labels | None = None) -> None: ...


class Histogram(Protocol):
    def record(self, amount: float, labels: Labels | None = None) -> None: ...


class _BoundCounter:
    def __init__(self, instrument: Counter, common: Labels) -> None:
        self._instrument, self._common = instrument, common

    def add(self, amount: float, labels: Labels | None = None) -> None:
        self._instrument.add(amount, {**self._common, **labels} if labels else self._common)


class _BoundHistogram:
    def __init__(self, instrument: Histogram, common: Labels) -> None:
        self._instrument, self._common = instrument, common

    def record(self, amount: float, labels: Labels | None = None) -> None:
        self._instrument.record(amount, {**self._common, **labels} if labels else self._common)


class MetricRegistry:
    """The metrics of one service; several may live in one process."""

    def __init__(self, service: str, common: Labels) -> None:
        """``common``: labels of every sample, such as ``model_name``."""
        self._common = dict(common)
        self._registry = CollectorRegistry()
        self._reader = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self._meter = self._provider.get_meter(f"foretoken.{service}")

    def counter(self, name: str, description: str) -> Counter:
        return _BoundCounter(self._meter.create_counter(PREFIX + name, description=description), self._common)

    def histogram(self, name: str, description: str, buckets: Sequence[float]) -> Histogram:
        """``buckets``: upper bounds, without infinity."""
        instrument = self._meter.create_histogram(
            PREFIX + name, description=description, explicit_bucket_boundaries_advisory=buckets
        )
        return _BoundHistogram(instrument, self._common)

    def observed_counter(self, name: str, description: str, samples: Samples) -> None:
        """A counter that somebody else counts: ``samples`` is called at each scrape."""
        self._meter.create_observable_counter(PREFIX + name, [self._callback(samples)], description=description)

    def observed_gauge(self, name: str, description: str, samples: Samples) -> None:
        """A gauge that is read at each scrape."""
        self._meter.create_observable_gauge(PREFIX + name, [self._callback(samples)], description=description)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        self._provider.shutdown()

    def _callback(self, samples: Samples) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, {**self._common, **labels}) for value, labels in samples()]

        return observe


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, service, logger, message and whatever ``extra`` holds."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD_LOG_FIELDS)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(service: str, level: str) -> None:
    """Send log lines of ``level`` (debug, info, warning, error) and above to stderr as JSON; once a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
