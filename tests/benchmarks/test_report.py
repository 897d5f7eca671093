"""Verdicts, tables and exit status from literal measurements."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import report, run
from benchmarks.environment import processor_name
from benchmarks.figures import Timing
from benchmarks.measure import Pair, PairWorkload, ReferencePass, TimedCompletion
from benchmarks.prompts import BenchPrompt
from benchmarks.report import Bar, Figure, mismatch_lines
from benchmarks.run import Measured, summarize

PROMPTS = (BenchPrompt((1,) * 250, "json/decoder.py"), BenchPrompt((2,) * 300, "http/client.py"))


def sample(index: int, decode_s: float, text: str = "same") -> TimedCompletion:
    """Return a sample of 128 tokens in 0.05 s and ``decode_s``."""
    return TimedCompletion(index, Timing(129, 0.05, decode_s), text, tokens_per_step=1.5, num_draft_tokens=7)


def pair(ratio: float, text: str = "same") -> Pair:
    """Return a pair: plain at 500 tok/s, n-gram ``ratio`` times as fast."""
    plain = [sample(0, 0.256), sample(1, 0.256)]
    return Pair(plain, [sample(0, 0.256 / ratio, text), sample(1, 0.256 / ratio)])


def reference_pass(transformers: float, added_ms: float) -> ReferencePass:
    """Return a pass served at 2 ms a token.

    transformers is ``transformers`` times as slow, the engine ``added_ms`` faster.
    """
    served = [Timing(129, 0.05, 0.256)] * 2
    engine = [Timing(129, 0.05, 0.256 - 0.128 * added_ms)] * 2
    return ReferencePass(served, engine, [Timing(129, 0.05, 0.256 * transformers)] * 2, num_equal_outputs=1)


GOOD = Measured(
    code=PairWorkload("held-out code", PROMPTS, 129),
    random=PairWorkload("random identifiers", PROMPTS, 129, 1.0),
    code_pairs=[pair(ratio) for ratio in (1.1, 1.4, 1.35, 1.2, 1.5)],
    random_pairs=[pair(ratio) for ratio in (0.9, 0.99, 1.0, 0.98, 1.1)],
    warm_pair=pair(3.0),
    outputs=[tuple(range(128))],
    passes=[reference_pass(1.5, 0.2)] * 3,
    concurrent_rates=[1300.0, 1200.0, 1400.0],
    idle=0.012,
    server={
        "model": "demo",
        "verifiers": [
            {"dtype": "float32", "mode": "strict", "drafters": [{"name": "ngram", "transport": "shared-memory"}]}
        ],
    },
)


def test_a_bar_is_inclusive_where_it_says_at_least() -> None:
    assert Bar("at least", 1.3).holds(1.3)
    assert not Bar("at least", 1.3).holds(1.2999)
    assert Bar("below", 0.25).holds(0.2499)
    assert not Bar("below", 0.25).holds(0.25)
    assert not Bar("at least", 1.3).holds(float("nan"))
    assert not Bar("below", 1.3).holds(float("nan"))


def test_figures_are_medians_of_pairs_and_passes() -> None:
    figures = {figure.name: figure.value for figure in summarize(GOOD, judged=True).figures}
    assert figures == {
        "n-gram / plain, held-out code": pytest.approx(1.35),
        "n-gram / plain, random identifiers": pytest.approx(0.99),
        "plain / transformers": pytest.approx(1.5),
        "8 plain streams / one": pytest.approx(1300 / 500),
        "added by gateway and gRPC": pytest.approx(0.2),
        "idle stack": pytest.approx(1.2),
    }


def test_a_run_above_all_bars_has_no_failure() -> None:
    assert summarize(GOOD, judged=True).failures() == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("n-gram / plain, held-out code", {"code_pairs": [pair(r) for r in (1.29, 1.2, 1.29, 1.9, 1.9)]}),
        ("n-gram / plain, random identifiers", {"random_pairs": [pair(r) for r in (0.96, 0.96, 0.9, 1.1, 1.1)]}),
        ("plain / transformers", {"passes": [reference_pass(0.99, 0.2)]}),
        ("8 plain streams / one", {"concurrent_rates": [1240.0, 1249.0, 1300.0]}),
        ("added by gateway and gRPC", {"passes": [reference_pass(1.5, 0.26)]}),
        ("idle stack", {"idle": 0.031}),
    ],
)
def test_each_missed_bar_is_named_and_only_that_one(name: str, change: dict[str, object]) -> None:
    measured = dataclasses.replace(GOOD, **change)
    (line,) = summarize(measured, judged=True).failures()
    assert line.startswith(f"{name}: ")
    assert summarize(measured, judged=False).failures() == []


def test_a_changed_text_fails_even_a_short_run() -> None:
    measured = dataclasses.replace(GOOD, random_pairs=[pair(1.0), pair(1.0, text="other")])
    (line,) = summarize(measured, judged=False).failures()
    assert line == "random identifiers, pair 2, prompt 0: n-gram text is not plain text"


def test_plain_text_must_be_the_same_in_every_pair() -> None:
    other = Pair([sample(0, 1.0, "x"), sample(1, 1.0)], [sample(0, 1.0, "x"), sample(1, 1.0)])
    assert mismatch_lines("code", [pair(1.0), other]) == ["code, pair 2: plain text is not that of pair 1"]


def test_what_was_not_measured_is_not_judged() -> None:
    result = summarize(dataclasses.replace(GOOD, idle=None), judged=True)
    assert result.failures() == []
    assert "| idle stack | not measured | below 3 |  |" in report.to_markdown(result)


def test_markdown_states_values_bars_and_formulas() -> None:
    text = report.to_markdown(summarize(dataclasses.replace(GOOD, idle=0.05), judged=True))
    assert "| plain | 500 | 50.0 | 1.50 | 1.00x |" in text
    assert "| n-gram / plain, held-out code | 1.35 x (1.1 to 1.5) | at least 1.3 | pass | tok/s of n-gram" in text
    assert "| idle stack | 5 % of one core | below 3 | **FAIL** | CPU seconds" in text
    assert "transformers made the same tokens for 3 of 6 outputs" in text
    assert "0.0% of the output tokens lie in an 8-gram" in text


def test_json_has_each_verdict() -> None:
    value = json.loads(report.to_json(summarize(dataclasses.replace(GOOD, idle=0.05), judged=True)))
    verdicts = {figure["name"]: figure["passed"] for figure in value["figures"]}
    assert verdicts["idle stack"] is False
    assert verdicts["plain / transformers"] is True
    assert value["failures"] == ["idle stack: 5 % of one core, must be below 3"]
    assert value["prompts"] == [
        {"source": "json/decoder.py", "tokens": 250},
        {"source": "http/client.py", "tokens": 300},
    ]


@pytest.mark.parametrize(("idle", "status"), [(0.01, 0), (0.04, 1)])
def test_the_exit_status_follows_the_bars(
    idle: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = summarize(dataclasses.replace(GOOD, idle=idle), judged=True)
    output = tmp_path / "results" / "cpu.json"
    monkeypatch.setattr(run, "measure_all", lambda options: result)
    monkeypatch.setattr(sys, "argv", ["run", "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == status
    assert ("FAIL: idle stack" in capsys.readouterr().out) == bool(status)
    assert bool(json.loads(output.read_text())["failures"]) == bool(status)


def test_a_figure_without_a_value_has_no_verdict() -> None:
    assert Figure("name", None, "x", "formula", Bar("below", 1.0)).passed is None


def test_processor_name() -> None:
    assert processor_name("processor\t: 0\nmodel name\t: Fast CPU: 9000\nmodel name\t: other\n") == "Fast CPU: 9000"
    assert processor_name("processor\t: 0\n") != ""
