"""Metrics in Prometheus' text format, and log lines as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from foretoken.telemetry import JsonFormatter, MetricRegistry


def samples(registry: MetricRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(registry.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_instruments_render_with_prefix_and_common_labels() -> None:
    registry = MetricRegistry("test", {"model_name": "m"})
    registry.counter("tokens", "Tokens.").add(2)
    registry.counter("ends", "Ends.").add(3, {"reason": "stop"})
    histogram = registry.histogram("latency_seconds", "Latency.", (0.1, 1.0))
    for value in (0.05, 0.5, 5.0):
        histogram.record(value)
    registry.observed_gauge("load", "Load.", lambda: [(0.5, {"drafter": "c"}), (0.25, {"drafter": "d"})])
    registry.observed_counter("steps", "Steps.", lambda: [(7, {})])
    seen = samples(registry)
    common = frozenset({("model_name", "m")})
    assert seen["foretoken_tokens_total", common] == 2
    assert seen["foretoken_ends_total", common | {("reason", "stop")}] == 3
    buckets = [seen["foretoken_latency_seconds_bucket", common | {("le", le)}] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert seen["foretoken_load", common | {("drafter", "c")}] == 0.5
    assert seen["foretoken_load", common | {("drafter", "d")}] == 0.25
    assert seen["foretoken_steps_total", common] == 7
    registry.close()


def test_registries_of_one_process_are_apart() -> None:
    first, second = MetricRegistry("a", {}), MetricRegistry("b", {})
    first.counter("hits", "Hits.").add(1)
    second.counter("hits", "Hits.").add(5)
    assert [samples(registry)["foretoken_hits_total", frozenset()] for registry in (first, second)] == [1, 5]
    first.close()
    assert samples(second)["foretoken_hits_total", frozenset()] == 5
    second.close()


def test_observed_values_that_are_not_there_are_left_out() -> None:
    registry = MetricRegistry("test", {})
    values: list[tuple[float, dict[str, str]]] = []
    registry.observed_gauge("load", "Load.", lambda: values)
    assert b"foretoken_load " not in registry.render()
    values.append((1.0, {}))
    assert b"foretoken_load 1.0" in registry.render()
    registry.close()


def test_log_lines_are_json_with_extras() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, "%s is down", ("d",), None)
    record.drafter = "ngram"
    line = json.loads(JsonFormatter("gateway").format(record))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "service": "gateway",
        "logger": "a.b",
        "message": "d is down",
        "drafter": "ngram",
    }


def test_configured_logging_goes_to_stderr_from_its_level_up() -> None:
    program = (
        "import logging; from foretoken.telemetry import configure_logging; configure_logging('svc', 'info'); "
        "logging.getLogger('x').debug('no'); logging.getLogger('x').info('yes', extra={'n': 1})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert {"message": "yes", "n": 1, "service": "svc"}.items() <= json.loads(line).items()
