"""The served load on a CPU: its ratios, and one small run of the whole command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import served_load
from benchmarks.arms import ARMS
from benchmarks.environment import ROOT
from benchmarks.report import missed_bars
from benchmarks.served_load import Rounds, Turn, figures_of_rounds, to_markdown, tokens_per_s


def rounds(auto: list[float], plain: list[float], fixed: list[float]) -> Rounds:
    names = [arm.name for arm in served_load.FIXED]
    return Rounds(4, {name: 100.0 + number for number, name in enumerate(names)}, plain, auto, fixed)


def test_ratios_are_medians_of_pairs_not_ratios_of_medians() -> None:
    found = rounds(auto=[10.0, 20.0, 90.0], plain=[10.0, 40.0, 30.0], fixed=[5.0, 20.0, 90.0])
    over_plain, over_fixed = figures_of_rounds([found])
    assert over_plain.values == (1.0, 0.5, 3.0) and over_plain.value == 1.0
    assert over_fixed.values == (2.0, 1.0, 1.0) and over_fixed.name == "auto / fixed-5-8-32, 4 streams"


def test_turns_count_by_their_time() -> None:
    assert tokens_per_s([Turn(100, 1.0), Turn(100, 3.0)]) == 50.0


def test_bars_of_both_ratios() -> None:
    assert missed_bars(figures_of_rounds([rounds([98.0], [100.0], [103.0])])) == []
    missed = missed_bars(figures_of_rounds([rounds([97.0], [100.0], [103.0])]))
    assert missed == [
        "auto / plain, 4 streams: 0.97 x, must be at least 0.98",
        "auto / fixed-5-8-32, 4 streams: 0.942 x, must be at least 0.95",
    ]


def test_the_table_has_medians_and_every_shape() -> None:
    table = to_markdown([rounds([98.0], [100.0], [103.0])])
    assert "| 4 | 100 | 98 | 103 | 100 | 101 | 102 | 103 |" in table


def test_auto_has_the_head_and_n_grams() -> None:
    assert served_load.AUTO.num_drafters == 2
    assert [arm.name for arm in served_load.FIXED] == ["fixed-1-1-2", "fixed-3-1-4", "fixed-5-1-6", "fixed-5-8-32"]


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.setattr(served_load, "FIXED", (ARMS["fixed-1-1-2"],))
    monkeypatch.setattr(served_load, "take_cores", str)
    output = tmp_path / "load.json"
    monkeypatch.setattr(sys, "argv", ["served_load", "--quick", "--streams", "2", "--output", str(output)])
    with pytest.raises(SystemExit, match="0"):
        served_load.main()
    (found,) = json.loads(output.read_text())["rounds"]
    assert found["num_streams"] == 2 and list(found["screened"]) == ["fixed-1-1-2"]
    assert all(len(found[name]) == 1 and found[name][0] > 0 for name in ("plain", "auto", "fixed"))
    text = capsys.readouterr().out
    assert "| auto / plain, 2 streams |" in text and "no bar was judged" in text
