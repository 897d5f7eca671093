"""The check of served loads: bars reached, missed and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arms import ARMS
from benchmarks.gpu import serving_check
from benchmarks.gpu.check import CannotJudgeError
from benchmarks.gpu.serving_bars import RATES, VLLM_ONCE
from benchmarks.gpu.serving_check import check, newest
from benchmarks.workloads import WORKLOADS, LoadPoint, ServingWorkload

COMMIT = "0123456789ab"
Results = dict[str, dict[str, Any]]


def row(workload: ServingWorkload, arm: str, point: LoadPoint, gpu: str) -> dict[str, Any]:
    """Return a row that reaches its bars."""
    vllm = ARMS[arm].engine == "vllm"
    rate = 100.0
    if workload.name == "core":
        goal = RATES["plain" if arm == "plain" else "auto"][point.concurrency].must * 1.01
        rate = VLLM_ONCE[point.concurrency] if vllm else goal * (0.9 if ARMS[arm].is_fixed else 1.0)
    return {
        "arm": arm,
        "point": point.name,
        "concurrency": point.concurrency,
        "rate": float(point.percent),
        "requests_a_stream": 1 if point.percent else 5,
        "num_requests": 5 * point.concurrency,
        "tokens_per_s": rate,
        "prompt_tokens_per_s": 41_000.0,
        "ttft_p50_ms": 20.0,
        "ttft_p99_ms": 60.0,
        "gap_p50_ms": 5.0,
        "gap_p99_ms": 30.0,
        "gap_max_ms": 90.0,
        "warm_up_gap_max_ms": 140.0,
        "client_busy": 0.3,
        "ready_s": 80.0,
        "attached_s": 80.0 if vllm or not ARMS[arm].num_drafters else 82.0,
        "commit": COMMIT,
        "gpu": gpu,
    }


def results(gpu: str = "NVIDIA H200", *names: str) -> Results:
    """Return a whole run that reaches every bar."""
    return {
        name: {
            "format": 1,
            "workload": name,
            "began_at": "2026-01-01T00:00:00+00:00",
            "device": {"gpu": gpu},
            "rows": [row(workload, arm, point, gpu) for arm in workload.arms for point in workload.points],
        }
        for name, workload in WORKLOADS.items()
        if not names or name in names
    }


def write(folder: Path, run: Results) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"serving-{name}.json" for name in run]
    for file, content in zip(files, run.values(), strict=True):
        file.write_text(json.dumps(content))
    return files


def change(run: Results, workload: str, arm: str, point: str, **fields: Any) -> None:
    (found,) = [each for each in run[workload]["rows"] if (each["arm"], each["point"]) == (arm, point)]
    found.update(fields)


def yes(commit: str) -> bool:
    return True


def test_a_whole_run_passes(tmp_path: Path) -> None:
    table, missed, errors = check(write(tmp_path, results()), yes)
    assert (missed, errors) == ([], [])
    assert "| core, auto at 16: tok/s | 6666 | at least 6600 | 7600 | pass |" in table
    assert "| core, auto / vLLM's best at 1 | 1.063 | at least 1.03 |  | pass |" in table


@pytest.mark.parametrize(
    ("workload", "arm", "point", "fields", "line"),
    [
        ("core", "auto", "16", {"tokens_per_s": 6599.0}, "core, auto at 16: tok/s: 6599, must be at least 6600"),
        ("core", "plain", "1", {"tokens_per_s": 219.0}, "core, plain at 1: tok/s: 219, must be at least 220"),
        ("core", "vllm-eagle3-3", "64", {"tokens_per_s": 10_500.0}, "core, auto / vLLM's best at 64: 1.029, must"),
        ("core", "auto", "64", {"ttft_p99_ms": 67.0}, "core, TTFT p99 of auto / that of vllm-plain at 64: 1.117, must"),
        ("core", "auto-ngram", "4", {"tokens_per_s": 790.0}, "core, auto-ngram / plain at 4: 0.9657, must be at least"),
        ("core", "ngram", "4", {"tokens_per_s": 790.0}, "core, ngram / plain at 4: 0.9657, must be at least"),
        ("core", "fixed-3-1-4", "4", {"tokens_per_s": 2460.0}, "core, auto / fixed-3-1-4 at 4: 0.9443, must be at"),
        ("core", "auto", "64", {"gap_p99_ms": 71.0}, "core, gap p99 of auto at 64: ms: 71, must be at most 70"),
        ("core", "auto", "256", {"gap_max_ms": 151.0}, "core, longest gap of auto at 256: ms: 151, must be at most"),
        ("core", "plain", "256", {"warm_up_gap_max_ms": 151.0}, "core, longest gap of plain at 256: ms: 151, must"),
        ("long-8k", "auto", "16", {"tokens_per_s": 97.0}, "long-8k, auto / plain at 16: 0.97, must be at least 0.98"),
        ("poisson", "auto", "90%", {"tokens_per_s": 97.0}, "poisson, auto / plain at 90%: 0.97, must be at least"),
        ("mixed", "fixed-5-1-6", "64", {"tokens_per_s": 106.0}, "mixed, auto / fixed-5-1-6 at 64: 0.9434, must be at"),
        ("poisson", "fixed-3-1-4", "25%", {"tokens_per_s": 106.0}, "poisson, auto / fixed-3-1-4 at 25%: 0.9434, must"),
        ("prefill", "plain", "16", {"prompt_tokens_per_s": 39e3}, "prefill, 1,000-token prompts at 16: tokens/s: 39"),
        (
            "odd",
            "fixed-ngram-5-1-6",
            "16, 1 with a grammar",
            {"gap_p50_ms": 5.6},
            "odd, step of the others / without, 16, 1 with a grammar: 1.12, must be at most 1.1",
        ),
        ("core", "auto", "1", {"ready_s": 241.0, "attached_s": 242.0}, "auto: seconds to ready: 241, must be at most"),
        ("core", "auto", "1", {"attached_s": 83.1}, "auto: seconds from ready to drafters attached: 3.1, must"),
        ("core", "auto", "1", {"attached_s": None}, "auto: seconds from ready to drafters attached: inf, must"),
    ],
)
def test_a_missed_bar_is_named(
    tmp_path: Path, workload: str, arm: str, point: str, fields: dict[str, Any], line: str
) -> None:
    run = results()
    change(run, workload, arm, point, **fields)
    table, missed, errors = check(write(tmp_path, run), yes)
    assert len(missed) >= 1 and any(each.startswith(line) for each in missed), missed
    assert errors == [] and table.count("**FAIL**") == len(missed)


def test_of_several_starts_the_fastest_is_a_warm_one(tmp_path: Path) -> None:
    run = results()
    for name, content in run.items():
        for each in content["rows"]:
            slow = each["arm"] == "plain"
            each["ready_s"] = (91.0 if name == "core" else 95.0) if slow else 80.0
    _, missed, errors = check(write(tmp_path / "run", run), yes)
    assert missed == ["plain: seconds to ready, fastest of 6 starts in run: 91, must be at most 90"]
    assert errors == []
    # Starts on different machines are cold ones.
    files = [file for name, content in run.items() for file in write(tmp_path / name, {name: content})]
    _, missed, errors = check(files, yes)
    assert (missed, errors) == ([], [])


def test_on_a_slow_card_absolute_bars_give_way(tmp_path: Path) -> None:
    run = results()
    for each in run["core"]["rows"]:
        each["tokens_per_s"] *= 0.9
    table, missed, errors = check(write(tmp_path, run), yes)
    assert (missed, errors) == ([], [])
    assert "gives way: a slow card, vLLM made 616 of 684" in table


def test_a_missing_row_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = results()
    run["core"]["rows"] = [each for each in run["core"]["rows"] if (each["arm"], each["point"]) != ("auto", "128")]
    del run["prefill"]
    _, missed, errors = check(write(tmp_path, run), yes)
    assert missed == []
    assert errors == ["missing row: core, auto, at 128", "missing row: prefill, plain, at 16"]


def test_an_h100_is_held_against_vllm_alone(tmp_path: Path) -> None:
    run = results("NVIDIA H100 80GB HBM3", "core")
    for each in run["core"]["rows"]:
        each["tokens_per_s"] *= 0.7
    run["core"]["rows"] = [each for each in run["core"]["rows"] if each["point"] in ("1", "16", "64")]
    table, missed, errors = check(write(tmp_path, run), yes)
    assert (missed, errors) == ([], []) and "core, auto at 1: tok/s" not in table
    change(run, "core", "vllm-plain", "16", tokens_per_s=9000.0)
    assert "core, auto / vLLM's best at 16" in check(write(tmp_path, run), yes)[1][0]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda run: change(run, "core", "auto", "1", commit="b"), f"core: rows of several commits: {COMMIT}, b"),
        (lambda run: change(run, "core", "auto", "1", gpu="NVIDIA H200 NVL"), "rows of several GPUs"),
        (lambda run: change(run, "core", "auto", "1", requests_a_stream=4), "auto at 1: 4 requests a stream, not 5"),
        (lambda run: change(run, "core", "auto", "1", client_busy=0.9), "auto at 1: a client was 90% busy"),
        (lambda run: change(run, "poisson", "auto", "50%", rate=51.0), "arrivals at 50% differ: 50.0 to 51.0"),
    ],
)
def test_rows_that_cannot_be_judged(tmp_path: Path, spoil: Callable[[Results], None], reason: str) -> None:
    run = results()
    spoil(run)
    assert any(line.startswith(reason) for line in check(write(tmp_path, run), yes)[2])


def test_vllms_rows_may_be_of_an_older_commit(tmp_path: Path) -> None:
    run = results()
    change(run, "core", "vllm-plain", "1", commit="b")
    assert check(write(tmp_path, run), yes)[2] == []


def test_only_what_is_committed_counts(tmp_path: Path) -> None:
    files = write(tmp_path, results())
    assert check(files, lambda commit: False)[2] == [f"commit {COMMIT} is not an ancestor of HEAD"]
    run = results()
    for content in run.values():
        for each in content["rows"]:
            each["commit"] = f"{COMMIT} with changes"
    assert "only what is committed" in check(write(tmp_path, run), yes)[2][0]


def test_another_processor_has_no_bars(tmp_path: Path) -> None:
    with pytest.raises(CannotJudgeError, match="bars are for one of H200, H100, not NVIDIA A100"):
        check(write(tmp_path, results("NVIDIA A100")), yes)


def test_workloads_may_be_of_different_commits(tmp_path: Path) -> None:
    run = results()
    for each in run["core"]["rows"]:
        each["commit"] = "b"
    table, missed, errors = check(write(tmp_path, run), yes)
    assert (missed, errors) == ([], [])
    assert f"- core: {tmp_path.name}/serving-core.json, commit b\n" in table


def test_the_newest_result_of_each_workload_and_gpu_is_judged(tmp_path: Path) -> None:
    old = write(tmp_path / "old", results())
    run = results("NVIDIA H200", "core", "mixed")
    run["core"]["began_at"] = "2026-01-02T00:00:00+00:00"
    run["mixed"]["began_at"] = "2025-12-31T00:00:00+00:00"
    write(tmp_path / "new", run)
    write(tmp_path / "other", run)[0].rename(tmp_path / "other" / "serving-core-special.json")
    found = {"H200": {*old} - {tmp_path / "old" / "serving-core.json"} | {tmp_path / "new" / "serving-core.json"}}
    assert {kind: {*files} for kind, files in newest(tmp_path).items()} == found
    found["H100"] = {*write(tmp_path / "h100", results("NVIDIA H100", "core"))}
    assert {kind: {*files} for kind, files in newest(tmp_path).items()} == found
    (file,) = write(tmp_path / "wrong", results("NVIDIA H200", "odd"))
    file.rename(tmp_path / "wrong" / "serving-mixed.json")
    with pytest.raises(CannotJudgeError, match="another workload"):
        newest(tmp_path)


def test_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def status(folder: Path | None = None) -> object:
        with pytest.raises(SystemExit) as ended:
            serving_check.main([] if folder is None else [str(folder)])
        return ended.value.code

    monkeypatch.setattr(serving_check.check, "__defaults__", (yes,))
    write(tmp_path / "a", results())
    assert status(tmp_path / "a") == 0
    run = results()
    change(run, "core", "auto", "16", tokens_per_s=6599.0)
    write(tmp_path / "b", run)
    assert status(tmp_path / "b") == 1
    assert "FAIL: core, auto at 16: tok/s: 6599, must be at least 6600" in capsys.readouterr().out
    run["core"]["rows"].pop()
    write(tmp_path / "c", run)
    assert status(tmp_path / "c") == 2
    assert "refused: missing row: core, vllm-eagle3-5, at 256" in capsys.readouterr().err
    assert status(tmp_path / "nothing") == 2
    # Without a folder both GPUs must have a result.
    monkeypatch.setattr(serving_check, "RESULTS", tmp_path / "a")
    assert status() == 2
    assert "no core row of an H100" in capsys.readouterr().err
