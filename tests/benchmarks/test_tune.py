"""How tuning is held against the full grid: the figures of
made-up pairs, and the servers' command lines.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import tune
from benchmarks.report import Bar, Figure, missed_bars
from benchmarks.tune import OF_BEST, Pairs, Served, _figure, _flags
from foretoken.cli import app
from foretoken.commands.settings_command import SettingsCommand
from foretoken.tune.candidates import DEFAULT_SHAPES, ShapeFlags


def test_a_ratio_is_the_median_of_pairs_and_has_a_bar() -> None:
    pairs = Pairs(4, "auto", "eagle3 5-1-6", [96.0, 97.0, 300.0], [100.0, 100.0, 100.0])
    figure = _figure(pairs, "tuning's auto / the grid's eagle3 5-1-6", OF_BEST)
    assert (figure.value, figure.passed) == (0.97, True)
    worse = _figure(Pairs(4, "auto", "eagle3 5-1-6", [96.9], [100.0]), "it", OF_BEST)
    assert missed_bars([worse]) == ["it, 4 at once: 0.969 x, must be at least 0.97"]


def test_the_same_candidate_is_as_good_as_itself_whatever_the_noise() -> None:
    assert _figure(Pairs(1, "auto", "auto", [50.0], [100.0]), "it", OF_BEST).value == 1.0


def test_a_quarter_of_the_time_is_too_much() -> None:
    assert not Bar("below", tune.OF_TIME).holds(0.25)
    share = Figure("time", 0.24, "x", "", Bar("below", tune.OF_TIME))
    assert share.passed


def test_the_servers_command_lines_are_those_of_serve() -> None:
    found = app.commands["serve"]
    assert isinstance(found, SettingsCommand)
    for words, expected in (
        (Served.of(None, None, 16).flags_for(DEFAULT_SHAPES), (8, 32)),
        ([*Served.of(None, None, 1).flags_for([ShapeFlags(1, 1, 2)]), *_flags(ShapeFlags(3, 2, 6))], (2, 6)),
    ):
        values = found.given(found.make_context("serve", words)).values
        assert (values["speculative_eagle_topk"], values["speculative_num_draft_tokens"]) == expected
        assert [drafter.split(",")[0] for drafter in values["drafters"]] == ["name=eagle3", "name=ngram"]


def test_other_models_take_the_place_of_the_demos(tmp_path: Path) -> None:
    words = Served.of(tmp_path / "target", tmp_path / "head", 4).flags()
    assert words[0] == str(tmp_path / "target")
    assert f"name=eagle3,algorithm=EAGLE3,model={tmp_path / 'head'}" in words
