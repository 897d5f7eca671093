"""The check of a run: refusals, failures, and exit status."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check
from benchmarks.gpu.bars import BARS, SETTINGS, Key, required_rows
from benchmarks.gpu.check import CannotJudgeError, judge, newest, refusals
from benchmarks.gpu.checkpoint import LLAMA_3_1_8B
from benchmarks.gpu.figure import draw

COMMIT = "0123456789ab"


def result(**milliseconds: float) -> dict[str, Any]:
    """Return a whole run that reaches every bar; the arguments are factors on its times by path."""
    rows = []
    for key in required_rows():
        setting = next(setting for setting in SETTINGS if setting.name == key.setting)
        bar = BARS[key.setting, 1 if key.path == "in-process" else key.batch]
        ms = bar.must * 0.99 * milliseconds.get(key.path.replace("-", "_"), 1.0)
        rows.append(
            {
                "setting": key.setting,
                "batch": key.batch,
                "path": key.path,
                "steps": setting.steps,
                "topk": setting.topk,
                "tokens": setting.tokens,
                "simulate_accept_length": None if setting.is_plain else setting.accept_length,
                "tokens_per_step": setting.accept_length,
                "num_dropped": 3,
                "num_rounds": 3,
                # Each sequence's first step.
                "num_fallback_steps": 0 if setting.is_plain else 3 * key.batch,
                "step_ms": [ms] * 201,
                "median_ms": ms,
                "floor_ms": 3.55,
                "invocation": "a",
                "commit": COMMIT,
                "gpu": "NVIDIA H200",
                "mode": "fast",
                "dtype": "bfloat16",
                "model_fingerprint": "f",
            }
        )
    return {
        "format": 1,
        "invocation": "a",
        "commit": COMMIT,
        "began_at": "2026-01-01T00:00:00+00:00",
        "command": "python -m benchmarks.gpu.steps",
        "versions": "Python",
        "device": {"gpu": "NVIDIA H200", "bandwidth": 4e12},
        "workload": {"prompt_tokens": 128, "output_tokens": 256},
        "model": LLAMA_3_1_8B.config(),
        "rows": rows,
    }


def row(run: dict[str, Any], setting: str, batch: int, path: str) -> dict[str, Any]:
    (found,) = [r for r in run["rows"] if (r["setting"], r["batch"], r["path"]) == (setting, batch, path)]
    return found  # type: ignore[no-any-return]


def yes(commit: str) -> bool:
    return True


def test_a_whole_run_is_judged_and_passes() -> None:
    run = result()
    assert refusals(run, yes) == []
    table, missed = judge(run)
    assert missed == []
    assert "| plain | 1 | 4.455 | 4.5 | 4.3 | pass | SGLang 4.81, vLLM 4.9 |" in table


def test_every_bar_of_the_table_is_required() -> None:
    keys = required_rows()
    assert {(key.setting, key.batch) for key in keys if key.path == "processes"} == set(BARS)
    assert len(keys) == len(set(keys)) == 16 + 12 + 5
    assert all(bar.goal < bar.must and bar.must < min(value for _, value in bar.peers) for bar in BARS.values())


def test_a_missed_bar_is_named() -> None:
    run = result()
    row(run, "tree 5-8-32", 4, "processes")["step_ms"] = [7.21] * 201
    table, missed = judge(run)
    assert missed == ["tree 5-8-32, batch 4: 7.210 ms, must be at most 7.2"]
    assert "**FAIL**" in table


def test_medians_are_those_of_the_steps_whatever_the_row_says() -> None:
    run = result()
    row(run, "plain", 1, "processes")["step_ms"] = [1.0] * 100 + [9.0] * 101
    assert judge(run)[1][0].startswith("plain, batch 1: 9.000 ms")


def test_the_gateway_and_the_process_split_have_their_bars() -> None:
    missed = judge(result(gateway=1.031))[1]
    assert len(missed) == 12 and "plain: gateway / verifier, batch 1: 1.031, must be at most 1.03" in missed
    missed = judge(result(in_process=0.96))[1]
    assert len(missed) == 5 and all("two processes / one" in line for line in missed)
    assert judge(result(gateway=1.02, in_process=0.98))[1] == []


def change(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda run: row(run, "chain 3-1-4", 16, "processes").update(fields)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda run: run["rows"].pop(3), "missing row: plain, batch 1, gateway"),
        (lambda run: run["rows"].append(copy.deepcopy(run["rows"][0])), "row twice: plain, batch 1, processes"),
        (change(invocation="b"), "rows of different runs: invocation is a, b"),
        (change(commit="ba9876543210"), "rows of different runs: commit"),
        (change(gpu="NVIDIA H100"), "rows of different runs: gpu"),
        (change(mode="strict"), "rows of different runs: mode is fast, strict"),
        (change(dtype="float32"), "rows of different runs: dtype"),
        (change(model_fingerprint="g"), "rows of different runs: model_fingerprint"),
        (lambda run: run.update(invocation="b"), "rows of another run: invocation"),
        (change(step_ms=[5.0] * 199), "chain 3-1-4, batch 16, processes: 199 step times, at least 200"),
        (change(num_dropped=11), "11 of 212 intervals"),
        (change(tokens=5), "its tree is 3-1-5"),
        (change(simulate_accept_length=None), "its acceptance was None, not 3.0"),
        (change(tokens_per_step=2.9), "2.90 tokens a step, not 3"),
        # 3 rounds of 16 sequences of 256 tokens, 3 a step: 4096 steps, and 48 first ones.
        (change(num_fallback_steps=48 + 205), "205 of 4096 steps of single sequences had no draft"),
        (lambda run: run["workload"].update(output_tokens=64), "128-token prompts and 64 tokens decoded"),
        (lambda run: run["device"].update(gpu="none: a processor"), "the bars are for one H200"),
        (lambda run: run["model"].update(num_hidden_layers=16), "num_hidden_layers 32, this is 16"),
        (lambda run: run.update(commit=""), "the commit is unknown"),
        (lambda run: run.update(commit=f"{COMMIT} with changes"), "with changes: only what is committed"),
    ],
)
def test_what_is_refused(spoil: Callable[[dict[str, Any]], object], reason: str) -> None:
    run = result()
    spoil(run)
    assert any(reason in line for line in refusals(run, yes)), refusals(run, yes)


def test_few_steps_without_a_draft_are_taken() -> None:
    run = result()
    change(num_fallback_steps=48 + 204)(run)
    assert refusals(run, yes) == []


def test_a_commit_that_is_no_ancestor_is_refused(tmp_path: Path) -> None:
    assert refusals(result(), lambda commit: False) == [f"commit {COMMIT} is not an ancestor of HEAD"]

    def git(*words: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    commits = []
    for number in range(2):
        git("commit", "--quiet", "--allow-empty", "--message", str(number))
        commits.append(git("rev-parse", "HEAD"))
    git("checkout", "--quiet", commits[0])
    assert check.is_ancestor(commits[0], tmp_path)
    assert not check.is_ancestor(commits[1], tmp_path)
    assert not check.is_ancestor(COMMIT, tmp_path)


def run_main(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        check.main([str(file)])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out + output.err


def test_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "is_ancestor", yes)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(result()))
    status, output = run_main(file, capsys)
    assert status == 0 and "NVIDIA H200" in output and COMMIT in output and "SGLang 0.5.15" in output
    file.write_text(json.dumps(result(gateway=1.5)))
    status, output = run_main(file, capsys)
    assert status == 1 and "FAIL: plain: gateway" in output
    run = result()
    del run["rows"][0]
    file.write_text(json.dumps(run))
    status, output = run_main(file, capsys)
    assert status == 2 and "refused: missing row: plain, batch 1, processes" in output
    for broken in ("", "[]", '{"format": 0, "rows": []}', '{"format": 1, "rows": [{}]}'):
        file.write_text(broken)
        assert run_main(file, capsys)[0] == 2
    assert run_main(tmp_path / "none.json", capsys)[0] == 2


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path) -> None:
    with pytest.raises(CannotJudgeError, match="no result"):
        newest(tmp_path)
    for name, day in (("a", 3), ("b", 5), ("c", 4)):
        run = result() | {"began_at": f"2026-01-0{day}T00:00:00+00:00"}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert newest(tmp_path).name == "b.json"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(result(), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_keys_read_as_a_line() -> None:
    assert str(Key("plain", 4, "gateway")) == "plain, batch 4, gateway"
