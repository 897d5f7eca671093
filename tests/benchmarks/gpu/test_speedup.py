"""End to end against plain decode: the figures, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Timing
from benchmarks.gpu import speedup
from benchmarks.gpu.checkpoint import DEMO
from benchmarks.measure import Pair, TimedCompletion

ROOT = Path(__file__).parents[3]


def sample(index: int, seconds: float, text: str, tokens_per_step: float) -> TimedCompletion:
    counts = {"num_spec_steps": 5, "drafters": {"eagle3": {"accepted_per_position": [4, 2]}}}
    return TimedCompletion(index, Timing(11, 0.1, seconds), text, tokens_per_step, 10, counts)


def test_the_figures() -> None:
    pairs = [
        Pair([sample(0, 1.0, "a", 1.0), sample(1, 1.0, "b", 1.0)], [sample(0, 0.5, "a", 2.0), sample(1, 0.5, "c", 2.0)])
    ]
    found = speedup.summary(pairs)
    assert found["speedup"] == pytest.approx(2.0) and found["tokens_per_step"] == 2.0
    assert found["plain_tokens_per_s"] == pytest.approx(10) and found["drafted_tokens_per_s"] == pytest.approx(20)
    assert found["plain_ms_per_step"] == pytest.approx(100) and found["drafted_ms_per_step"] == pytest.approx(100)
    assert found["accepted_per_position"] == (0.8, 0.4)
    assert (found["num_outputs"], found["num_other_texts"]) == (2, 1)


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the small model itself; test_widen shows that a widened one is the same function."""
    words = ["--model", str(DEMO / "target"), "--drafter-head", str(DEMO / "eagle3")]
    words += ["--output", str(tmp_path / "speedup.json"), "--tree", "4", "2", "8", "--threads", "1"]
    words += ["--prompts", "4", "--tokens", "48", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", ["speedup", *words])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    with pytest.raises(SystemExit, match="0"):
        speedup.main()
    found = json.loads((tmp_path / "speedup.json").read_text())
    assert found["mode"] == "strict" and found["num_other_texts"] == 0 and found["num_outputs"] == 4
    # Late drafts of a busy machine are not counted at a position.
    assert found["tokens_per_step"] > 1 and found["accepted_per_position"][0] > 0.5
    assert found["tree"] == "4-2-8" and "0 of 4 texts differ" in capsys.readouterr().out
