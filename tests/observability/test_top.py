"""``foretoken top`` computes what Prometheus answers to the dashboard's
queries, here as promtool evaluates them.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from foretoken.top.figures import Figures, figures
from foretoken.top.reading import Reading
from foretoken.top.window import Window

FOLDER = Path(__file__).parents[2] / "docker" / "observability"
PANELS = {
    panel["title"]: {target["legendFormat"]: target["expr"] for target in panel["targets"]}
    for panel in json.loads((FOLDER / "grafana" / "foretoken.json").read_text())["panels"]
    if panel["type"] != "row"
}
OF_V = 'verifier="v"'
OF_D = 'drafter="d",verifier="v"'
# By sample: what it was, and 10 seconds later. Nothing begins at zero: there Prometheus
# extrapolates otherwise.
SAMPLES = {
    f"engine_generated_tokens_total{{{OF_V}}}": (1000, 1300),
    f"engine_prompt_tokens_total{{{OF_V}}}": (500, 570),
    f"engine_steps_total{{{OF_V}}}": (500, 600),
    f"fallback_steps_total{{{OF_V}}}": (12, 32),
    'request_success_total{finished_reason="stop"}': (10, 40),
    f"spec_decode_num_drafts_total{{{OF_D}}}": (100, 180),
    f"spec_decode_num_draft_tokens_total{{{OF_D}}}": (400, 720),
    f"spec_decode_num_accepted_tokens_total{{{OF_D}}}": (200, 360),
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="0",{OF_D}}}': (90, 162),
    f'spec_decode_num_accepted_tokens_per_pos_total{{position="1",{OF_D}}}': (30, 65),
    **{
        f'step_time_us_total{{phase="{phase}",{OF_V}}}': (1e6, 1e6 + 1e3 * number)
        for number, phase in enumerate(("forward", "verify", "schedule", "draft_post", "publish", "draft_wait"), 17)
    },
    f"drafter_draft_grow_s{{{OF_D}}}": (3.0, 3.015),
    f"prefix_cache_queries_total{{{OF_V}}}": (100, 300),
    f"prefix_cache_hits_total{{{OF_V}}}": (10, 60),
    # 20, 50 and 30 observations up to 0.1, 0.5 and 1 second, and 1 above.
    **{
        f'time_to_first_token_seconds_bucket{{le="{bound}"}}': counts
        for bound, counts in {"0.1": (5, 25), "0.5": (7, 77), "1.0": (8, 108), "+Inf": (8, 109)}.items()
    },
    f'drafter_info{{state="attached",{OF_D}}}': (1, 1),
}


def expected(found: Figures) -> dict[tuple[str, str], tuple[str, float | None]]:
    """Return our figures by a panel's title and legend, with the labels of Prometheus' answer."""
    (drafter,) = found.drafters
    steps, first = found.steps, found.latencies["Time to first token"]
    assert steps.time is not None
    return {
        ("Tokens a second", "output"): ("{}", found.load.output_tokens),
        ("Tokens a second", "prompts"): ("{}", found.load.prompt_tokens),
        ("Finished, failed and refused", "{{finished_reason}}"): ('{finished_reason="stop"}', found.load.finished),
        ("Time to first token", "p50"): ("{}", first.p50),
        ("Time to first token", "p99"): ("{}", first.p99),
        ("Acceptance rate by drafter", "{{drafter}}"): ('{drafter="d"}', drafter.acceptance),
        ("Mean acceptance length by drafter", "{{drafter}}"): ('{drafter="d"}', drafter.length),
        ("Tokens a step", "a sequence"): ("{}", steps.tokens_of_sequence),
        ("Tokens a step", "whole batch"): ("{}", steps.tokens_of_batch),
        ("Tokens a step", "share from drafts"): ("{}", steps.share_from_drafts),
        ("Draft, hand-over, verify and host", "draft"): ("{}", steps.time.draft),
        ("Draft, hand-over, verify and host", "hand-over"): ("{}", steps.time.hand_over),
        ("Draft, hand-over, verify and host", "verify"): ("{}", steps.time.verify),
        ("Draft, hand-over, verify and host", "host"): ("{}", steps.time.host),
        ("Prompt tokens found in the prefix cache", "found"): ("{}", found.found_in_prefix_cache),
    }


def is_answer(title: str, legend: str, labels: str, value: float | None) -> dict[str, object]:
    """Return promtool's check that a query's answer is ``value``."""
    assert value is not None and math.isfinite(value), (title, legend)
    # A millisecond more than between the samples: next to nothing is extrapolated.
    query = PANELS[title][legend].replace("$__rate_interval", "10001ms")
    is_near = f"abs(({query}) - {value}) <= bool {1e-6 * value}"
    return {"expr": is_near, "eval_time": "10s", "exp_samples": [{"labels": labels, "value": 1}]}


def check(promtool: str, folder: Path, checks: list[dict[str, object]]) -> subprocess.CompletedProcess[str]:
    series = [
        {"series": f"foretoken_{name}", "values": f"{before} {after}"} for name, (before, after) in SAMPLES.items()
    ]
    test = {"interval": "10s", "input_series": series, "promql_expr_test": checks}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "10s", "tests": [test]}))
    return subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)


def test_top_shows_what_prometheus_answers(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (on Debian: apt-get install prometheus)")
    window = Window(60)
    for at in (0, 1):
        text = "".join(f"foretoken_{name} {values[at]}\n" for name, values in SAMPLES.items())
        window.add(Reading.of(text, 10.0 * at))
    found = figures(window)
    checks = [is_answer(*key, *value) for key, value in expected(found).items()]
    done = check(promtool, tmp_path, checks)
    assert done.returncode == 0, done.stdout + done.stderr
    # It would say so if one differed.
    p50 = found.latencies["Time to first token"].p50
    assert p50 is not None
    assert check(promtool, tmp_path, [is_answer("Time to first token", "p50", "{}", 1.01 * p50)]).returncode == 1
