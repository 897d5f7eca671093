"""Metrics in Prometheus' text format, and log lines as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from foretoken.telemetry import JsonFormatter, MetricRegistry, add_up, counts, parse, render, with_vllm_names

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(registry: MetricRegistry) -> Samples:
    return read(render(registry.families()))


def read(text: bytes) -> Samples:
    return {(s.name, frozenset(s.labels.items())): s.value for family in parse(text.decode()) for s in family.samples}


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
    assert b"foretoken_load " not in render(registry.families())
    values.append((1.0, {}))
    assert b"foretoken_load 1.0" in render(registry.families())
    registry.close()


def registry_of_a_process(scale: int) -> MetricRegistry:
    registry = MetricRegistry("test", {"model_name": "m"})
    registry.counter("tokens", "Tokens.").add(scale)
    registry.counter("ends", "Ends.").add(scale, {"reason": "stop" if scale == 1 else "length"})
    registry.histogram("latency_seconds", "Latency.", (0.5,)).record(0.25 * scale)
    registry.observed_gauge("inside", "Inside.", lambda: [(10 * scale, {})])
    return registry


def test_processes_add_up_as_text_and_those_that_ended_keep_their_counts() -> None:
    registries = [registry_of_a_process(1), registry_of_a_process(4)]
    first, second = (parse(render(registry.families()).decode()) for registry in registries)
    common = frozenset({("model_name", "m")})
    both = read(render(add_up([first, second])))
    assert both["foretoken_tokens_total", common] == 5
    assert both["foretoken_ends_total", common | {("reason", "stop")}] == 1
    assert both["foretoken_ends_total", common | {("reason", "length")}] == 4
    assert both["foretoken_latency_seconds_bucket", common | {("le", "0.5")}] == 1
    assert both["foretoken_latency_seconds_bucket", common | {("le", "+Inf")}] == 2
    assert both["foretoken_latency_seconds_sum", common] == 1.25
    assert both["foretoken_inside", common] == 50
    one_ended = read(render(add_up([counts(first), second])))
    assert one_ended == both | {("foretoken_inside", common): 40}
    assert render(add_up([first])) == render(registries[0].families())
    for registry in registries:
        registry.close()


def test_the_same_samples_under_vllms_names_and_labels() -> None:
    registry = MetricRegistry("test", {"model_name": "m"})
    accepted = [(3, {"verifier": "v2", "drafter": "a"}), (4, {"verifier": "v2", "drafter": "b"})]
    accepted.append((9, {"verifier": "v1", "drafter": "a"}))
    registry.observed_counter("accepted", "Accepted.", lambda: accepted, vllm=True)
    registry.histogram("latency_seconds", "Latency.", (0.5,), vllm=True).record(1)
    registry.counter("ours_alone", "Ours.").add(1)
    plain = samples(registry)
    seen = read(render(with_vllm_names(registry.families(), registry.in_vllm)))
    assert plain.items() <= seen.items()
    common = frozenset({("model_name", "m")})
    added = {key: value for key, value in seen.items() if key not in plain}
    first = common | {("engine", "0")}
    assert added == {
        ("vllm:accepted_total", first): 9,
        # Summed over drafters, which vLLM does not know.
        ("vllm:accepted_total", common | {("engine", "1")}): 7,
        ("vllm:latency_seconds_bucket", first | {("le", "0.5")}): 0,
        ("vllm:latency_seconds_bucket", first | {("le", "+Inf")}): 1,
        ("vllm:latency_seconds_count", first): 1,
        ("vllm:latency_seconds_sum", first): 1,
    }
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
