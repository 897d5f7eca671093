"""The course of a tuning, with made-up measurements: who is
measured where, an interrupt, the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from foretoken.errors import ConfigError
from foretoken.tune import report, tuner
from foretoken.tune.candidates import AUTO, PLAIN, Candidate, TunedDrafter, candidates
from foretoken.tune.choice import LimitedCandidate, choose
from foretoken.tune.settings import TuneSettings
from foretoken.tune.tuner import Findings, Tuner, plan_of

TRIED = candidates(
    [TunedDrafter("eagle3", has_model=True), TunedDrafter("ngram", has_model=False)], (), TuneSettings().draft_shapes
)


def speed(candidate: Candidate, batch: int) -> float:
    """Return a speed with another best candidate at each load."""
    if candidate == PLAIN:
        return 100.0 * batch
    if candidate == AUTO:
        return 110.0 * batch
    if candidate.shape is None:
        return 90.0 * batch
    nodes = candidate.shape.num_draft_tokens
    best = 8 if batch == 1 else 2
    return (200.0 - 10 * abs(nodes - best)) * batch if nodes < 9 else 50.0 * batch


class Made:
    """Stands for Meter. ``calls``: batch, candidate and the round's number; None for a warm-up."""

    calls: list[tuple[int, Candidate, int | None]]
    on_call: Callable[[int], None] = staticmethod(lambda count: None)

    def __init__(self, target: Any, prompts: Any, clients: Any, batch: int, *more: Any) -> None:
        self._batch = batch

    def warm_up(self, candidate: Candidate) -> None:
        self.calls.append((self._batch, candidate, None))

    def rate(self, candidate: Candidate, number: int) -> float:
        self.calls.append((self._batch, candidate, number))
        type(self).on_call(len(self.calls))
        return speed(candidate, self._batch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> type[Made]:
    kind = type("Made", (Made,), {"calls": []})
    monkeypatch.setattr(tuner, "Meter", kind)
    return kind


def tune(**values: Any) -> tuple[Findings, list[str], Tuner]:
    lines: list[str] = []
    settings = TuneSettings.model_validate(values)
    made = Tuner(settings, TRIED, None, None, None, lines.append)  # type: ignore[arg-type]
    return made.run(), lines, made


def test_it_takes_a_fifth_of_the_grids_rounds_and_finds_each_loads_best(made: type[Made]) -> None:
    findings, lines, course = tune(max_concurrency="1,16")
    assert course.num_grid_rounds == 2 * 24 * len(TRIED)
    assert 0.15 * course.num_grid_rounds < findings.num_rounds <= 0.2 * course.num_grid_rounds
    rates = report.medians(findings)
    assert {batch: max(found, key=found.__getitem__).name for batch, found in rates.items()} == {
        1: "eagle3 7-1-8",
        16: "eagle3 1-1-2",
    }
    # Each load's winner is measured for longer at the other one, where it was dropped early.
    by_name = {candidate.name: candidate for candidate in TRIED}
    dropped_first = min(map(len, findings.rates[1].values()))
    assert len(findings.rates[1][by_name["eagle3 1-1-2"]]) > dropped_first
    assert any("more rounds of eagle3 1-1-2" in line for line in lines)
    # Rounds of a candidate are numbered: the same number has the same prompts for all.
    for batch in (1, 16):
        for candidate in TRIED:
            numbers = [number for b, c, number in made.calls if (b, c) == (batch, candidate)]
            assert numbers == [None, *range(len(numbers) - 1)]


def test_a_budget_of_1_is_the_full_grid(made: type[Made]) -> None:
    findings, _, course = tune(max_concurrency="1,4", budget="1", num_rounds="5")
    assert findings.num_rounds == course.num_grid_rounds == 2 * 5 * len(TRIED)
    assert {len(rounds) for found in findings.rates.values() for rounds in found.values()} == {5}


@pytest.mark.parametrize(
    ("values", "has", "would_do"),
    [
        ({"max_concurrency": "1", "budget": "0.04"}, 12, {"num_rounds": 58, "budget": 0.1}),
        ({"max_concurrency": "1,4", "num_rounds": "4"}, 8, {"num_rounds": 15, "budget": 0.73}),
        # No number of rounds that may be given is enough.
        ({"max_concurrency": "1", "budget": "0.0001"}, 0, {"budget": 0.1}),
    ],
)
def test_too_small_a_budget_is_refused_with_numbers_that_would_do(
    values: dict[str, str], has: int, would_do: dict[str, float]
) -> None:
    def plan(**more: object) -> object:
        return plan_of(TuneSettings.model_validate(values | more), TRIED)

    with pytest.raises(
        ConfigError, match=f"--budget: needs at least 30 rounds for 13 candidates, and may use {has}: "
    ) as refusal:
        plan()
    flags = {"num_rounds": "--num-rounds", "budget": "--budget"}
    named = " or ".join(f"{flags[name]} {number:g}" for name, number in would_do.items())
    assert refusal.value.message.endswith(f": {named} would do, or try fewer --shapes")
    for (name, number), step in zip(would_do.items(), (1, 0.01) if len(would_do) > 1 else (0.01,), strict=True):
        plan(**{name: number})
        with pytest.raises(ConfigError):
            plan(**{name: number - step})


@pytest.mark.parametrize(("at", "batches"), [(20, {1}), (60, {1}), (100, {1, 16})])
def test_an_interrupt_ends_it_with_what_can_be_compared(
    at: int, batches: set[int], made: type[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(count: int) -> None:
        if count == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(made, "on_call", staticmethod(interrupt))
    findings, _, _ = tune(max_concurrency="1,16")
    assert findings.is_interrupted and set(findings.rates) == batches
    choice = choose(report.medians(findings), dict.fromkeys(batches, 1.0))
    assert choice.score > 0


def test_the_report_names_the_best_and_why_one_is_chosen(made: type[Made]) -> None:
    findings, _, _ = tune(max_concurrency="1,16")
    weights = {1: 1.0, 16: 1.0}
    choice = choose(report.medians(findings), weights)
    table = report.to_table(findings, weights)
    assert re.search(r"\| eagle3 7-1-8 \| \*\*200\*\* \|", table)
    assert re.search(r"\| eagle3 7-8-32 \| \(50\) \| \(800\) \|", table)
    lines = report.to_lines(findings, choice)
    assert lines[0] == (
        "best with 1 at once: eagle3 7-1-8, 200 tok/s (200 to 200 in 8 rounds); "
        "2.00 x plain (100 to 100), 1.82 x auto (110 to 110)"
    )
    assert lines[2].startswith(f"chosen for all: {choice.name}; on average it reaches ")
    assert "more than 1% faster" in lines[2]
    # The best mean over both is a candidate that halving dropped at each.
    assert "rarely: eagle3 4-1-5 (2 rounds with 1 at once), eagle3 4-1-5 (2 rounds with 16 at once)" in lines[3]
    content = json.loads(json.dumps(report.to_content(findings, choice, {"model": "m"})))
    assert content["best"] == {"1": "eagle3 7-1-8", "16": "eagle3 1-1-2"} and content["model"] == "m"
    picture = ElementTree.fromstring(report.draw(findings, choice))
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    assert {"plain", "auto", "chosen", "best of each", "eagle3 7-1-8"} <= texts
    ticks = [element.text for element in picture.iter() if element.get("y") == "480.0"]
    assert ticks == ["1", "16"]


def test_the_picture_of_one_number_of_requests_has_a_bar_for_each_candidate(made: type[Made]) -> None:
    findings, _, _ = tune(max_concurrency="16")
    choice = choose(report.medians(findings), {16: 1.0})
    picture = ElementTree.fromstring(report.draw(findings, choice))
    bars = [element for element in picture.iter() if element.get("height") == "18"]
    texts = [str(element.text) for element in picture.iter() if element.tag.endswith("text")]
    assert len(bars) == len(report.medians(findings)[16])
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert lengths == sorted(lengths, reverse=True)
    assert [text for text in texts if "chosen" in text] == ["3200, chosen"]
    assert "100, dropped early" not in texts and any("dropped early" in text for text in texts)
    assert texts[0] == "Output tokens a second by candidate, 16 requests at once"


def test_a_bar_beyond_the_limit_of_drafts_is_marked_for_plain_decode() -> None:
    findings = Findings({8: {PLAIN: [100.0], TRIED[2]: [90.0]}})
    picture = ElementTree.fromstring(report.draw(findings, LimitedCandidate(TRIED[2], 4, 1.0)))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert texts[texts.index("plain") + 1] == "100, chosen"


def test_the_report_shows_the_least_and_the_most_of_the_rounds() -> None:
    findings = Findings({4: {PLAIN: [100.0, 120.0, 90.0, 95.0], TRIED[2]: [110.0, 99.0, 130.0, 125.0, 105.0]}})
    lines = report.to_lines(findings, LimitedCandidate(TRIED[2], 0, 1.0))
    assert lines[0] == (
        "best with 4 at once: eagle3 1-1-2, 110 tok/s (99 to 130 in 5 rounds); 1.13 x plain (90 to 120)"
    )
    assert not any("PRELIMINARY" in line for line in lines)


def test_the_report_is_preliminary_where_few_rounds_decided() -> None:
    rates = {PLAIN: [100.0, 90.0], AUTO: [100.0] * 4, TRIED[2]: [99.0], TRIED[3]: [110.0] * 3}
    choice = LimitedCandidate(TRIED[3], 0, 1.0)
    *_, line = report.to_lines(Findings({1: {**rates, PLAIN: [90.0] * 4}, 4: rates}), choice)
    # What was dropped early decides nothing.
    assert line == (
        "PRELIMINARY: fewer than 4 rounds may be chance. Measured so rarely: eagle3 2-1-3 (3 rounds with 1 at once), "
        "plain (2 rounds with 4 at once), eagle3 2-1-3 (3 rounds with 4 at once). "
        "More --num-rounds or --budget measure for longer"
    )


def test_it_says_so_when_plain_decode_or_auto_is_best() -> None:
    for best, words in ((PLAIN, "Plain decode is best"), (AUTO, "No fixed candidate is 1% faster")):
        findings = Findings({1: {PLAIN: [100.0] * 4, AUTO: [90.0] * 4, TRIED[2]: [80.0] * 4}})
        findings.rates[1][best] = [100.0] * 4
        if best == AUTO:
            findings.rates[1][PLAIN] = [50.0] * 4
        choice = choose(report.medians(findings), {1: 1.0})
        assert choice.candidate == best and words in report.to_lines(findings, choice)[-1]


def test_the_report_says_on_which_text_it_was_measured() -> None:
    plain, tree, file = LimitedCandidate(PLAIN, 0, 1.0), LimitedCandidate(TRIED[2], 0, 1.0), Path("mine.jsonl")
    for choice in (plain, tree):
        (line,) = report.to_caution(choice, None)
        assert "random words" in line and "--dataset-name file --dataset-path FILE" in line
        assert ("Speculation is off" in line) == (choice == plain)
    (line,) = report.to_caution(plain, file)
    assert "the prompts of mine.jsonl" in line and "random" not in line
    assert report.to_caution(tree, file) == []


def test_settings_are_split_at_commas_and_checked(tmp_path: Path) -> None:
    settings = TuneSettings.model_validate({"max_concurrency": ("16,1", "4"), "weights": "1,2,3", "shapes": "3-1-4"})
    assert settings.batches == (1, 4, 16) and settings.weight_of == {16: 1.0, 1: 2.0, 4: 3.0}
    assert settings.draft_shapes == ((3, 1, 4),)
    assert [settings.round_size(batch) for batch in settings.batches] == [4, 8, 32]
    assert TuneSettings.model_validate({"requests_per_round": "4", "max_concurrency": "1,4"}).round_size(1) == 4
    for values, words in (
        ({"weights": "1,2"}, "as many numbers as --max-concurrency"),
        (
            {"requests_per_round": "1", "max_concurrency": "1,4"},
            "--requests-per-round: 1 cannot keep 4 requests running at once; give at least 4, or auto",
        ),
        ({"requests_per_round": "15"}, "give at least 16, or auto"),
        ({"max_concurrency": "0"}, "expected numbers above 0"),
        ({"shapes": "3-1-9"}, "a chain of 3 levels has 4 nodes"),
        ({"dataset_path": tmp_path}, "--dataset-path belongs to"),
    ):
        with pytest.raises(ValueError, match=words):
            TuneSettings.model_validate(values)
