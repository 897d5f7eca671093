"""Figures of a window of readings: the dashboard's, by its metrics and formulas."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from foretoken.top import figures as module
from foretoken.top.figures import (
    HOST_PHASES,
    VERIFY_PHASES,
    ControllerChoice,
    Latency,
    StepTime,
    VerifierStatus,
    figures,
)
from foretoken.top.reading import Reading
from foretoken.top.window import Window

ROOT = Path(__file__).parents[3]
PANELS = {
    panel["title"]: [target["expr"] for target in panel["targets"]]
    for panel in json.loads((ROOT / "docker" / "observability" / "grafana" / "foretoken.json").read_text())["panels"]
    if panel["type"] != "row"
}
# Panels that say more of a step's time than fits.
LEFT_OUT = {"Mean wait for a draft", "Time that draft models work"}

OF_V = 'verifier="v"'
OF_D = 'drafter="d",verifier="v"'
BEFORE = {
    f"verifier_up{{{OF_V}}}": 1.0,
    "request_success_total": 10.0,
    f"engine_generated_tokens_total{{{OF_V}}}": 1000.0,
    f"engine_steps_total{{{OF_V}}}": 500.0,
    f"fallback_steps_total{{{OF_V}}}": 12.0,
    f"spec_decode_num_drafts_total{{{OF_D}}}": 100.0,
    f"spec_decode_num_draft_tokens_total{{{OF_D}}}": 400.0,
    f"spec_decode_num_accepted_tokens_total{{{OF_D}}}": 200.0,
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="0",{OF_D}}}': 90.0,
    f'step_time_us_total{{phase="forward",{OF_V}}}': 1e6,
    f'step_time_us_total{{phase="schedule",{OF_V}}}': 1e6,
    f'step_time_us_total{{phase="draft_wait",{OF_V}}}': 1e6,
    f"drafter_draft_grow_s{{{OF_D}}}": 3.0,
    f"prefix_cache_queries_total{{{OF_V}}}": 100.0,
    f"prefix_cache_hits_total{{{OF_V}}}": 0.0,
    f'drafter_info{{state="connecting",{OF_D}}}': 1.0,
}
AFTER = BEFORE | {
    "request_success_total": 14.0,
    f"num_requests_running{{{OF_V}}}": 3.0,
    "gateway_num_requests": 4.0,
    f"engine_generated_tokens_total{{{OF_V}}}": 1300.0,
    f"engine_steps_total{{{OF_V}}}": 600.0,
    f"spec_decode_num_drafts_total{{{OF_D}}}": 180.0,
    f"spec_decode_num_draft_tokens_total{{{OF_D}}}": 720.0,
    f"spec_decode_num_accepted_tokens_total{{{OF_D}}}": 360.0,
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="0",{OF_D}}}': 162.0,
    # Its first ones; and a position without any.
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="1",{OF_D}}}': 8.0,
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="2",{OF_D}}}': 0.0,
    f'step_time_us_total{{phase="forward",{OF_V}}}': 1.2e6,
    f'step_time_us_total{{phase="schedule",{OF_V}}}': 1.1e6,
    f'step_time_us_total{{phase="draft_wait",{OF_V}}}': 1.08e6,
    f"drafter_draft_grow_s{{{OF_D}}}": 3.05,
    f"fallback_steps_total{{{OF_V}}}": 32.0,
    f'fallback_reasons_total{{reason="first_step",{OF_V}}}': 4.0,
    f'fallback_reasons_total{{reason="last_token",{OF_V}}}': 8.0,
    f"prefix_cache_queries_total{{{OF_V}}}": 300.0,
    f"prefix_cache_hits_total{{{OF_V}}}": 50.0,
    f"kv_cache_usage_perc{{{OF_V}}}": 0.25,
    'time_to_first_token_seconds_bucket{le="1.0"}': 3.0,
    'time_to_first_token_seconds_bucket{le="+Inf"}': 4.0,
    f"drafter_attaches_total{{{OF_D}}}": 2.0,
}


def exposition(values: Mapping[str, float]) -> str:
    return "".join(f"foretoken_{name} {value}\n" for name, value in values.items())


def window(*readings: tuple[float, Mapping[str, float]], seconds: float = 10.0) -> Window:
    found = Window(seconds)
    for at, values in readings:
        found.add(Reading.of(exposition(values), at))
    return found


def test_rates_and_shares_are_of_the_window() -> None:
    found = figures(window((100.0, BEFORE), (104.0, AFTER)))
    assert found.seconds == 4.0
    load, steps = found.load, found.steps
    assert (load.running, load.in_gateways, load.waiting_in_verifiers) == (3, 4, 0)
    assert (load.output_tokens, load.finished, load.failed) == (75.0, 1.0, 0.0)
    assert (steps.tokens_of_batch, steps.share_from_drafts) == (3.0, 160 / 300)
    # 80 rows verified a draft, 20 had none.
    assert steps.tokens_of_sequence == 1 + 160 / 100
    assert list(steps.without_draft.items()) == [("last_token", 2.0), ("first_step", 1.0)]
    assert found.found_in_prefix_cache == 0.25
    assert found.latencies["Time to first token"] == Latency(pytest.approx(2 / 3), float("inf"), (1.0,))
    assert found.latencies["Whole request"] == Latency(None, None, ())
    assert found.verifiers == (VerifierStatus("v", True, 0.25),)


def test_a_drafters_figures() -> None:
    (drafter,) = figures(window((0.0, BEFORE), (4.0, AFTER))).drafters
    assert (drafter.name, drafter.states, drafter.attaches) == ("d", {"connecting": 1}, 2)
    assert (drafter.acceptance, drafter.length) == (0.5, 3.0)
    assert drafter.by_position == (0.9, 0.1)


def test_the_drafters_own_time_is_taken_off_the_wait() -> None:
    """100 steps waited 80 ms in all, and the drafter worked 50 ms."""
    time = figures(window((0.0, BEFORE), (4.0, AFTER))).steps.time
    assert time == StepTime(draft=pytest.approx(500), hand_over=pytest.approx(300), verify=2000, host=1000)


def test_one_reading_has_gauges_and_no_rates() -> None:
    found = figures(window((0.0, AFTER)))
    assert (found.seconds, found.load.running, found.load.output_tokens) == (0.0, 3, None)
    assert found.steps.time is None and found.steps.without_draft == {}
    assert found.drafters[0].acceptance is None and found.drafters[0].by_position == ()


def test_a_restart_within_the_window_makes_no_rate_negative() -> None:
    """2 requests ended before the gateway came back with none, and 3 after."""
    counts = [(0.0, 10.0), (2.0, 12.0), (4.0, 0.0), (6.0, 3.0)]
    found = figures(window(*((at, {"request_success_total": count}) for at, count in counts)))
    assert found.load.finished == 5 / 6


def test_older_readings_leave_the_window() -> None:
    readings = [(float(at), {"request_success_total": float(at)}) for at in range(0, 30, 2)]
    assert figures(window(*readings)).seconds == 10.0
    # A gateway that was away for long: nothing is known of the time between.
    assert figures(window(readings[0], readings[-1])).load.finished is None


def test_what_a_controller_chose_and_why() -> None:
    chosen = {
        "nodes": 6.0,
        "levels": 5.0,
        "rows": 4.0,
        "because_drafts_pay": 1.0,
        "because_probe": 0.0,
        "tokens_per_second": 800.0,
        "plain_tokens_per_second": 500.0,
    }
    found = figures(window((0.0, {f"drafter_chosen_{name}{{{OF_D}}}": value for name, value in chosen.items()})))
    assert found.choices == (ControllerChoice("d", "v", 6, 5, 4.0, "drafts_pay", 800.0, 500.0),)


def test_a_verifier_that_does_not_answer_is_down() -> None:
    assert figures(window((0.0, {f"verifier_up{{{OF_V}}}": 0.0}))).verifiers == (VerifierStatus("v", False, None),)


def test_the_dashboards_metrics_are_read() -> None:
    """Panel by panel, except for those that are left out."""
    source = inspect.getsource(module)
    assert PANELS.keys() > LEFT_OUT
    for title in PANELS.keys() - LEFT_OUT:
        for name in re.findall(r"foretoken_(\w+)", " ".join(PANELS[title])):
            name = name.removesuffix("_bucket").removeprefix("drafter_chosen_").removesuffix("_")
            assert name in source, f"{title}: {name}"
    queries = str(PANELS)
    for name in re.findall(r'"(\w+_total)"', source):
        assert f"foretoken_{name}" in queries, name


def test_phases_are_divided_as_on_the_dashboard() -> None:
    queries = "".join(PANELS["Draft, hand-over, verify and host"])
    found = [set(phases.split("|")) for phases in re.findall(r'phase=~"([^"]+)"', queries)]
    assert found == [set(VERIFY_PHASES), set(HOST_PHASES)]


def test_the_time_per_output_token_is_that_of_whole_requests() -> None:
    """As ``foretoken bench`` defines it; the time between two tokens is another figure."""
    now = {
        'request_time_per_output_token_seconds_bucket{le="0.01"}': 0.0,
        'request_time_per_output_token_seconds_bucket{le="0.03"}': 2.0,
        'inter_token_latency_seconds_bucket{le="0.01"}': 0.0,
        'inter_token_latency_seconds_bucket{le="0.07"}': 2.0,
    }
    found = figures(window((0.0, {f"verifier_up{{{OF_V}}}": 1.0}), (4.0, now))).latencies
    assert found["Time per output token"].p50 == pytest.approx(0.02)
    assert found["Inter-token latency"].p50 == pytest.approx(0.04)


def test_titles_of_latencies_are_the_dashboards() -> None:
    for title, name in module.LATENCIES.items():
        assert f"foretoken_{name}_bucket" in PANELS[title][0]
