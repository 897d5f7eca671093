"""How long the GPU is idle: the command on a CPU, which records nothing, and its output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import idle
from benchmarks.gpu.bars import SETTINGS
from benchmarks.gpu.checkpoint import SHAPES, random_eagle3, random_target
from benchmarks.gpu.timeline import DeviceSpan, timeline_of
from tests.benchmarks.gpu.test_timeline import steps


def test_the_figures_and_their_table() -> None:
    row = {"setting": "plain", "batch": 1, "step_ms": 0.0944, "num_steps": 9, "num_resident_steps": 7}
    row |= idle.figures(timeline_of(steps(20)), 0.0944)
    assert row["busy_ms"] == pytest.approx(0.093) and row["idle_share_recorded"] == pytest.approx(0.07)
    assert row["idle_share"] == pytest.approx(1.4 / 94.4)
    assert "idle 1.5% of a step of 0.094 ms (at most 2%: reached); recorded 7.0% of 0.100 ms" in idle.to_line(row)
    assert "(at most 2%: missed)" in idle.to_line(row | {"idle_share": 0.0201})
    table = idle.to_markdown([row])
    assert "| plain | 1 | 0.094 | 0.093 | 1.5% | 0.100 | 7.0% | 1 us, 1 x | 7 of 9 |" in table
    assert "| matmul -> sample | 6.0 | 1.0 | 6.0 |" in table and "| matmul | 73.0 | 1.0 | 73.0 |" in table


def test_long_names_are_cut() -> None:
    spans = [DeviceSpan(span.name.replace("matmul", "m" * 500), *span[1:]) for span in steps(20)]
    row = {"setting": "plain", "batch": 1, "step_ms": 1.0, "num_steps": 9, "num_resident_steps": 7}
    row |= idle.figures(timeline_of(spans), 1.0)
    assert f"| {'m' * 60} -> sample |" in idle.to_markdown([row])


def test_flags_of_a_verifier_that_holds_its_drafter() -> None:
    plain, tree = SETTINGS[0], SETTINGS[3]
    assert idle.verifier_flags(plain, Path("/x"), 16) == ["--max-running-requests", "16", "--disable-radix-cache"]
    flags = " ".join(idle.verifier_flags(tree, Path("/x"), 16))
    assert "--drafter name=eagle3,algorithm=EAGLE3,model=/x --speculative-num-steps 5" in flags
    assert "placement" not in flags


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    random_target(tmp_path / "target", SHAPES["tiny"])
    random_eagle3(tmp_path / "eagle3", tmp_path / "target", draft_vocab_size=1000)
    words = ["--model", str(tmp_path / "target"), "--drafter-head", str(tmp_path / "eagle3"), "--threads", "1"]
    words += ["--output", str(tmp_path / "idle.json"), "--settings", "tree 5-8-32", "--batches", "1"]
    words += ["--steps", "12", "--min-steps", "12", "--prompt-tokens", "20"]
    monkeypatch.setattr(sys, "argv", ["idle", *words])
    with pytest.raises(SystemExit, match="0 kernels and copies were recorded, and 0 overlapped steps"):
        idle.main()
    assert not (tmp_path / "idle.json").exists()

    def made_up(trace: dict[str, Any]) -> list[DeviceSpan]:
        assert trace["traceEvents"]
        return steps(20)

    monkeypatch.setattr(idle, "spans_of", made_up)
    idle.main()
    (row,) = json.loads((tmp_path / "idle.json").read_text())["rows"]
    assert row["num_recorded_steps"] == 9 and row["busy_ms"] == pytest.approx(0.093)
    assert row["num_steps"] > 0 and row["num_resident_steps"] == 0 and row["step_ms"] > 0
    assert "| tree 5-8-32 | 1 |" in capsys.readouterr().out
