"""Register metrics, export them, and format logs. Only this module knows the metrics library.

Names of metrics are Prometheus names, without the ``_total`` that counters get at export.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

PREFIX = "foretoken_"
VLLM_PREFIX = "vllm:"
VERIFIER_LABEL, DRAFTER_LABEL = "verifier", "drafter"
EXPOSITION_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Labels = Mapping[str, str]
# Returns the values of one metric at a scrape, one for each set of labels.
Samples = Callable[[], Iterable[tuple[float, Labels]]]
# One metric with its samples.
Family = Metric

_STANDARD_LOG_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Counter:
    """Counts what is added, with the labels that all samples have."""

    def __init__(self, instrument: metrics.Counter, common: Labels) -> None:
        self._instrument, self._common = instrument, common

    def add(self, amount: float, labels: Labels | None = None) -> None:
        self._instrument.add(amount, {**self._common, **labels} if labels else self._common)


class Histogram:
    """Counts amounts by bucket. Record and collect on one thread.

    OpenTelemetry's histogram takes several microseconds for a record, and one is made for each
    streamed chunk.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], labels: Labels) -> None:
        """``bounds``: the buckets' upper bounds in order, without infinity."""
        self._name, self._description, self._labels = name, description, labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def record(self, amount: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterator[Family]:
        """Yield the family; nothing before the first record. The Prometheus registry calls it."""
        totals = list(itertools.accumulate(self._counts))
        if totals[-1]:
            family = HistogramMetricFamily(self._name, self._description, labels=list(self._labels))
            buckets = list(zip([*map(str, self._bounds), "+Inf"], totals, strict=True))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family


class MetricRegistry:
    """Holds the metrics of one service; a process may have several registries.

    Each metric is declared once. ``vllm=True`` means that vLLM has a metric of the same name and
    meaning: ``with_vllm_names`` can also show its samples under that name.
    """

    def __init__(self, service: str, common: Labels) -> None:
        """``common``: labels for every sample, such as ``model_name``."""
        self._common = dict(common)
        self._registry = CollectorRegistry()
        self._reader = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self._meter = self._provider.get_meter(f"foretoken.{service}")
        # Our names of the families that vLLM also has.
        self.in_vllm: set[str] = set()
        # Names of all metrics, as declared.
        self.names: set[str] = set()

    def counter(self, name: str, description: str, *, vllm: bool = False) -> Counter:
        instrument = self._meter.create_counter(self._declared(name, vllm), description=description)
        return Counter(instrument, self._common)

    def histogram(self, name: str, description: str, buckets: Sequence[float], *, vllm: bool = False) -> Histogram:
        """Declare a histogram; ``buckets`` are upper bounds, without infinity."""
        histogram = Histogram(self._declared(name, vllm), description, buckets, self._common)
        self._registry.register(histogram)
        return histogram

    def observed_counter(self, name: str, description: str, samples: Samples, *, vllm: bool = False) -> None:
        """Declare a counter whose values ``samples`` returns at each scrape."""
        self._meter.create_observable_counter(
            self._declared(name, vllm), [self._callback(samples)], description=description
        )

    def observed_gauge(self, name: str, description: str, samples: Samples, *, vllm: bool = False) -> None:
        """Declare a gauge whose values ``samples`` returns at each scrape."""
        self._meter.create_observable_gauge(
            self._declared(name, vllm), [self._callback(samples)], description=description
        )

    def families(self) -> list[Family]:
        """Return all metrics with their present values."""
        return list(self._registry.collect())

    def close(self) -> None:
        self._provider.shutdown()

    def _declared(self, name: str, vllm: bool) -> str:
        self.names.add(name)
        if vllm:
            self.in_vllm.add(PREFIX + name)
        return PREFIX + name

    def _callback(self, samples: Samples) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, {**self._common, **labels}) for value, labels in samples()]

        return observe


class _Collected:
    """Families in the form of a registry, as prometheus_client needs it."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def render(families: Iterable[Family]) -> bytes:
    """Write families in Prometheus' text format."""
    return generate_latest(_Collected(families))


def parse(text: str) -> list[Family]:
    """Read families from Prometheus' text format."""
    return list(text_string_to_metric_families(text))


def counts(families: Iterable[Family]) -> list[Family]:
    """Return the families that only grow: counters and histograms."""
    return [family for family in families if family.type in ("counter", "histogram")]


def add_up(parts: Iterable[Iterable[Family]]) -> list[Family]:
    """Return the sum over several processes: add samples of the same name and labels."""
    return [_merged(first.name, first, same) for first, same in _by_name(parts)]


def with_vllm_names(families: Iterable[Family], in_vllm: Iterable[str]) -> list[Family]:
    """Return ``families``, and those named in ``in_vllm`` again under vLLM's names.

    The copies have vLLM's label ``engine``, the number of the verifier, and are summed over
    drafters, for which vLLM has no label.
    """
    families, names = list(families), frozenset(in_vllm)
    verifiers = {s.labels[VERIFIER_LABEL] for f in families for s in f.samples if VERIFIER_LABEL in s.labels}
    engines = {verifier: str(number) for number, verifier in enumerate(sorted(verifiers))}

    def relabel(labels: Labels) -> dict[str, str]:
        kept = {key: value for key, value in labels.items() if key not in (VERIFIER_LABEL, DRAFTER_LABEL)}
        return kept | {"engine": engines.get(labels.get(VERIFIER_LABEL, ""), "0")}

    copies = [
        _merged(VLLM_PREFIX + family.name.removeprefix(PREFIX), family, [family], relabel)
        for family in families
        if family.name in names
    ]
    return families + copies


def _by_name(parts: Iterable[Iterable[Family]]) -> list[tuple[Family, list[Family]]]:
    groups: dict[str, list[Family]] = {}
    for part in parts:
        for family in part:
            groups.setdefault(family.name, []).append(family)
    return [(group[0], group) for group in groups.values()]


def _merged(
    name: str, kind: Family, families: Iterable[Family], relabel: Callable[[Labels], dict[str, str]] = dict
) -> Family:
    """Return one family called ``name``: the sum of all samples by their new labels."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        for sample in family.samples:
            key = (name + sample.name.removeprefix(family.name), tuple(sorted(relabel(sample.labels).items())))
            totals[key] = totals.get(key, 0.0) + sample.value
    merged = Metric(name, kind.documentation, kind.type)
    for (sample_name, labels), value in totals.items():
        merged.add_sample(sample_name, dict(labels), value)
    return merged


class JsonFormatter(logging.Formatter):
    """Formats a line as JSON: time (UTC), level, service, logger, message and ``extra``."""

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
    """Log lines of ``level`` (debug, info, warning, error) and above to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
