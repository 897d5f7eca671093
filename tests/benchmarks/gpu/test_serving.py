"""The driver of served loads, against foretoken's demo and a stand-in for vLLM."""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arm_server import Launch
from benchmarks.arms import ARMS
from benchmarks.environment import ROOT
from benchmarks.gpu import serving
from benchmarks.gpu.serving import ServingMeasurement, chosen_arms, chosen_points, run, to_line, to_markdown
from benchmarks.gpu.serving_figure import draw
from benchmarks.gpu.serving_result import ServingResult
from benchmarks.stack import StackError
from benchmarks.workloads import WORKLOADS, LoadPoint, ServingWorkload
from foretoken.bench.load import Clients, running_clients
from foretoken.bench.picture import nice_ticks

DEMO = ROOT / "models" / "demo"
FACTS: dict[str, Any] = {
    "began_at": "2026-01-01T00:00:00+00:00",
    "command": "test",
    "commit": "c",
    "device": {"gpu": "none"},
}
# It answers as vLLM does: a chunk a token, usage at the end, and its own counters.
VLLM = """
import http.server, json, sys
counts = {"drafts": 0, "accepted_tokens": 0}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        lines = []
        for name, value in counts.items():
            full = f"vllm:spec_decode_num_{name}"
            lines += [f"# HELP {full}_total x", f"# TYPE {full}_total counter", full + '_total{engine="0"} %d' % value]
        self.answer("\\n".join(lines) + "\\n")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["cache_salt"] and body["ignore_eos"] and body["model"] == "benchmark", body
        counts["drafts"] += 2
        counts["accepted_tokens"] += 4
        events = [{"choices": [{"text": "a", "finish_reason": None}]} for _ in range(body["max_tokens"])]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events.append({"choices": [], "usage": usage})
        self.answer("".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n")
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *words):
        pass
words = dict(zip(sys.argv[1::1], sys.argv[2::1]))
assert words["--max-num-seqs"] == "4" and "--no-enable-prefix-caching" in sys.argv, sys.argv
json.loads(words["--speculative-config"])
http.server.ThreadingHTTPServer(("127.0.0.1", int(words["--port"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with running_clients(1) as found:
        yield found


@pytest.fixture
def vllm_path(tmp_path: Path) -> Path:
    module = tmp_path / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(VLLM)
    return tmp_path / "packages"


def measurement(clients: Clients, workload: ServingWorkload, **fields: Any) -> ServingMeasurement:
    launch = Launch(DEMO / "target", DEMO / "eagle3", 4, **fields)
    return ServingMeasurement(workload, launch, clients, 2, seconds=0.5, best_tokens_per_s=40.0)


def a_row(arm: str = "plain", point: str = "1", **fields: Any) -> dict[str, Any]:
    numbers = ("tokens_per_s", "user_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
    numbers += ("gap_p99_ms", "gap_max_ms", "good_requests_per_s", "good_share", "tokens_per_step", "ready_s")
    row = {name: 1.0 for name in numbers} | {"arm": arm, "point": point, "concurrency": 1, "rate": 0.0}
    return row | {"requests_a_stream": 5, "gpu_idle": None, "client_busy": 0.1, "attached_s": 1.0} | fields


@pytest.mark.slow
def test_a_point_of_the_demo_is_measured_and_not_measured_again(
    tmp_path: Path, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    workload = ServingWorkload("core", 12, ("auto",), (LoadPoint(2), LoadPoint(percent=50)))
    measured = measurement(clients, workload, logs=tmp_path / "logs")
    result = ServingResult(tmp_path, "core", FACTS)
    assert run(measured, [ARMS["auto"]], workload.points, result) == []
    closed, arrivals = json.loads(result.file.read_text())["rows"]
    assert (closed["arm"], closed["point"], closed["num_requests"], closed["num_tokens"]) == ("auto", "2", 4, 48)
    assert (arrivals["point"], arrivals["num_tokens"]) == ("50%", 12 * arrivals["num_requests"])
    assert arrivals["rate"] == pytest.approx(0.5 * 40 / 12)
    for row in (closed, arrivals):
        assert row["tokens_per_s"] > 0 and row["tokens_per_step"] >= 1 and row["engine_step_ms"] > 0
        assert row["counters"]["engine_generated_tokens"] == row["num_tokens"]
        assert 0 < row["ready_s"] <= row["attached_s"]
        assert row["gpu"] == "none" and row["commit"] == "c" and "--disable-radix-cache" in row["flags"]
    assert xml.fromstring(result.file.with_suffix(".svg").read_text()).tag.endswith("svg")
    assert len(list((tmp_path / "logs").iterdir())) == 1

    # Rows are there: no server starts again.
    def refuse(*words: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(Launch, "start", refuse)
    assert run(measured, [ARMS["auto"]], workload.points, ServingResult(tmp_path, "core", FACTS)) == []


def test_vllm_is_started_from_its_folder(tmp_path: Path, vllm_path: Path, clients: Clients) -> None:
    workload = ServingWorkload("core", 6, ("vllm-eagle3-3",), (LoadPoint(2),))
    result = ServingResult(tmp_path, "core", FACTS)
    measured = measurement(clients, workload, vllm_path=vllm_path)
    assert run(measured, [ARMS["vllm-eagle3-3"]], workload.points, result) == []
    (row,) = result.rows
    assert (row["num_requests"], row["num_tokens"], row["tokens_per_step"]) == (4, 24, 3.0)
    assert row["counters"]["spec_decode_num_drafts"] == 8


def test_an_arm_that_fails_is_named_and_the_others_go_on(tmp_path: Path, vllm_path: Path, clients: Clients) -> None:
    workload = ServingWorkload("core", 6, ("vllm-plain", "vllm-eagle3-3"), (LoadPoint(1),))
    result = ServingResult(tmp_path, "core", FACTS)
    measured = measurement(clients, workload, vllm_path=vllm_path)
    # The stand-in wants a head, so plain decode ends it.
    (failure,) = run(measured, [ARMS["vllm-plain"], ARMS["vllm-eagle3-3"]], workload.points, result)
    assert failure.startswith("core, vllm-plain: vLLM ended with status 1") and "KeyError" in failure
    assert [row["arm"] for row in result.rows] == ["vllm-eagle3-3"]


def test_which_rows_are_there(tmp_path: Path) -> None:
    result = ServingResult(tmp_path, "core", FACTS)
    result.add(a_row())
    result.add(a_row("vllm-plain"))
    result.add(a_row("auto", "50%", rate=10.0, requests_a_stream=1))
    again = ServingResult(tmp_path, "core", FACTS)
    assert again.has("plain", "1", 5, 0.0) and not again.has("plain", "16", 5, 0.0)
    assert not again.has("plain", "1", 6, 0.0)
    assert again.has("auto", "50%", 1, 10.05) and not again.has("auto", "50%", 1, 11.0)
    later = ServingResult(tmp_path, "core", FACTS | {"commit": "d"})
    assert not later.has("plain", "1", 5, 0.0) and later.has("vllm-plain", "1", 5, 0.0)
    other = ServingResult(tmp_path, "core", FACTS | {"device": {"gpu": "NVIDIA H100"}})
    assert not other.has("vllm-plain", "1", 5, 0.0)


def test_a_row_that_is_measured_again_replaces_the_old_one(tmp_path: Path) -> None:
    ServingResult(tmp_path, "core", FACTS).add(a_row(tokens_per_s=1.0))
    result = ServingResult(tmp_path, "core", FACTS | {"commit": "d"})
    result.add(a_row(tokens_per_s=2.0))
    assert [(row["tokens_per_s"], row["commit"]) for row in ServingResult(tmp_path, "core", FACTS).rows] == [(2.0, "d")]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "serving-core.json").write_text('{"format": 1, "workload": "odd", "rows": []}')
    with pytest.raises(ValueError, match="is no result of this workload"):
        ServingResult(tmp_path, "core", FACTS)


def test_a_line_says_when_the_client_may_be_the_limit() -> None:
    assert "IT MAY BE THE LIMIT" in to_line(a_row(client_busy=0.9))
    assert "IT MAY BE" not in to_line(a_row()) and "GPU idle unknown (no nvidia-smi)" in to_line(a_row())
    assert "GPU idle 12%" in to_line(a_row(gpu_idle=0.12))
    assert "| 1.0, never |" in to_markdown({"rows": [a_row(attached_s=None)]})


def test_the_picture_has_a_line_for_each_arm() -> None:
    rows = [a_row(point="1"), a_row(point="16", tokens_per_s=9.0), a_row("auto", "16, <odd>")]
    picture = draw({"workload": "core", "device": {"gpu": "none & such"}, "rows": rows})
    root = xml.fromstring(picture)
    assert len(root.findall("{*}polyline")) == 2
    texts = [element.text for element in root.findall("{*}text")]
    assert {"plain", "auto", "1", "16", "16, <odd>"} <= set(texts)


@pytest.mark.parametrize(("most", "last"), [(684.0, 800.0), (14_800.0, 15_000.0), (0.0, 1.0), (1.0, 1.0)])
def test_ticks_are_round_and_reach_the_most(most: float, last: float) -> None:
    ticks = nice_ticks(most)
    assert ticks[0] == 0 and ticks[-1] == pytest.approx(last) and 4 <= len(ticks) <= 7


def test_arms_and_points_that_are_chosen() -> None:
    core = WORKLOADS["core"]
    assert [arm.name for arm in chosen_arms(core, ["auto", "plain"], None)] == ["plain", "auto"]
    assert not any(arm.engine == "vllm" for arm in chosen_arms(core, [], None))
    assert len(chosen_arms(core, [], Path("/v"))) == len(core.arms)
    with pytest.raises(StackError, match="vllm-plain: vLLM needs --vllm-path"):
        chosen_arms(core, ["vllm-plain"], None)
    options = argparse.Namespace(concurrency=[1, 64], percent=[90])
    assert [point.name for point in chosen_points(core, options)] == ["1", "64"]
    assert [point.name for point in chosen_points(WORKLOADS["poisson"], options)] == ["90%"]


def test_rates_of_arrivals_need_a_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "run_facts", lambda module, commit: FACTS)
    monkeypatch.setattr(sys, "argv", ["serving", "--output", str(tmp_path), "--workload", "poisson", "--clients", "1"])
    with pytest.raises(SystemExit, match="1"):
        serving.main()
    assert "FAIL: poisson: rates need rows of auto" in capsys.readouterr().out
