"""Write what was found as tables, as JSON, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from foretoken.bench.picture import Mark, Picture
from foretoken.tune.bars import Bar, draw_bars
from foretoken.tune.candidates import AUTO, BASELINES, PLAIN, Candidate
from foretoken.tune.choice import LimitedCandidate, best_of, score_of
from foretoken.tune.tuner import Findings

# With fewer rounds the median may be one lucky round.
ENOUGH_ROUNDS = 4
COLOURS = {"plain": "#718096", "auto": "#2f855a", "chosen": "#dd6b20", "best of each": "#93b4f5"}
# A candidate of several names shows under each: a narrow line lies on a wide one.
WIDTHS = {"best of each": 9.0, "plain": 5.0, "auto": 5.0}
# Of a bar whose candidate has no colour of its own.
OTHER = "#93b4f5"


def medians(findings: Findings) -> dict[int, dict[Candidate, float]]:
    """Return the median of each candidate's rounds, by requests at once.

    There is nothing where nothing was measured.
    """
    found = {
        batch: {candidate: median(rounds) for candidate, rounds in measured.items() if rounds}
        for batch, measured in findings.rates.items()
    }
    return {batch: rates for batch, rates in found.items() if rates}


def to_table(findings: Findings, weights: Mapping[int, float]) -> str:
    """Return a row for each candidate: tok/s by requests at once.

    Brackets mark where it was dropped early.
    """
    rates = medians(findings)
    candidates = list(dict.fromkeys(candidate for measured in rates.values() for candidate in measured))
    titles = [f"{batch} at once, tok/s" for batch in rates]
    lines = [
        f"| candidate | {' | '.join(titles)} | of the best |",
        f"| --- |{' ---: |' * (len(titles) + 1)}",
    ]
    for candidate in candidates:
        cells = [_cell(candidate, findings.rates[batch], measured) for batch, measured in rates.items()]
        score = score_of(candidate, rates, weights)
        lines.append(f"| {candidate.name} | {' | '.join(cells)} | {f'{score:.2f}' if score else ''} |")
    return "\n".join(lines)


def to_lines(findings: Findings, choice: LimitedCandidate) -> list[str]:
    """Return sentences that name the best candidates.

    There is one for each number of requests at once, and one for all.

    The least and the most of the rounds stand beside each speed.
    """
    lines = []
    for batch, rates in medians(findings).items():
        best = best_of(rates)
        rounds = findings.rates[batch]
        against = [
            f"{rates[best] / rates[other]:.2f} x {other.name} ({_span(rounds[other])})"
            for other in BASELINES
            if other in rates and other != best
        ]
        more = f"; {', '.join(against)}" if against else ""
        speed = f"{rates[best]:.0f} tok/s ({_span(rounds[best])} in {_rounds(len(rounds[best]))})"
        lines.append(f"best with {batch} at once: {best.name}, {speed}{more}")
    lines.append(
        f"chosen for all: {choice.name}; on average it reaches {choice.score:.0%} of the fastest candidate's speed. "
        f"{_why(choice)}"
    )
    return lines + _preliminary(findings, choice)


def to_caution(choice: LimitedCandidate, dataset_path: Path | None) -> list[str]:
    """Return what to know of the text that was measured.

    It is empty where drafts won on the user's own prompts.

    ``dataset_path``: the prompts' file; None: they were random words.
    """
    if dataset_path is None:
        off = " Speculation is off on their account alone." if choice.candidate == PLAIN else ""
        return [
            "CAUTION: this was measured on random words, which drafters seldom guess; your text may do otherwise."
            f"{off} Try prompts of yours: --dataset-name file --dataset-path FILE, one prompt a line"
        ]
    if choice.candidate == PLAIN:
        return [
            f"this was measured on the prompts of {dataset_path}; drafts may be worth their cost on other text, "
            "which --dataset-path names"
        ]
    return []


def to_content(findings: Findings, choice: LimitedCandidate, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as JSON's values."""
    return {
        **facts,
        "is_interrupted": findings.is_interrupted,
        "seconds": round(findings.seconds, 1),
        "num_rounds": findings.num_rounds,
        "choice": {
            "candidate": choice.candidate.name,
            "max_batch_size": choice.max_batch_size,
            "score": choice.score,
        },
        "best": {str(batch): best_of(rates).name for batch, rates in medians(findings).items()},
        "tokens_per_s": {
            str(batch): {candidate.name: rounds for candidate, rounds in measured.items()}
            for batch, measured in findings.rates.items()
        },
    }


def draw(findings: Findings, choice: LimitedCandidate) -> str:
    """Return a picture of the speeds as SVG text.

    It has a line by requests at once for the choice, the best, ``auto`` and plain decode; with one
    number of requests, a bar for each candidate.
    """
    rates = medians(findings)
    if len(rates) == 1:
        return _draw_bars(findings, choice)
    lines: dict[str, list[Mark]] = {"best of each": []}
    named: Candidate | None = None
    for index, measured in enumerate(rates.values()):
        best = best_of(measured)
        lines["best of each"].append(Mark(index, measured[best], "" if best == named else best.name))
        named = best
    for name, candidate, limit in (
        ("plain", PLAIN, 0),
        ("auto", AUTO, 0),
        ("chosen", choice.candidate, choice.max_batch_size),
    ):
        taken = [_taken(candidate, limit, batch) for batch in rates]
        marks = [
            Mark(index, measured[each], "")
            for index, (each, measured) in enumerate(zip(taken, rates.values(), strict=True))
            if each in measured
        ]
        if marks:
            lines[name] = marks
    return Picture(
        title="Output tokens a second by requests at once; labels name the fastest where it changes",
        x_title="requests at once",
        y_title="output tokens a second, all requests",
        lines=lines,
        colours=COLOURS,
        places=list(map(str, rates)),
        widths=WIDTHS,
    ).svg()


def _taken(candidate: Candidate, limit: int, batch: int) -> Candidate:
    """Return the candidate for a batch: plain decode above ``limit`` requests; 0: no limit."""
    return PLAIN if 0 < limit < batch else candidate


def _draw_bars(findings: Findings, choice: LimitedCandidate) -> str:
    """Return bars for the only number of requests, the fastest candidate first."""
    ((batch, rates),) = medians(findings).items()
    chosen = _taken(choice.candidate, choice.max_batch_size, batch)
    most_rounds = max(map(len, findings.rates[batch].values()))
    bars = []
    for candidate in sorted(rates, key=lambda each: -rates[each]):
        words = [f"{rates[candidate]:.0f}"]
        if candidate == chosen:
            words.append("chosen")
        if len(findings.rates[batch][candidate]) < most_rounds:
            words.append("dropped early")
        colour = COLOURS["chosen"] if candidate == chosen else COLOURS.get(candidate.name, OTHER)
        bars.append(Bar(candidate.name, rates[candidate], ", ".join(words), colour, candidate == chosen))
    title = f"Output tokens a second by candidate, {batch} request{'s' if batch != 1 else ''} at once"
    return draw_bars(title, "output tokens a second, all requests", bars)


def _cell(candidate: Candidate, measured: Mapping[Candidate, list[float]], rates: Mapping[Candidate, float]) -> str:
    if candidate not in rates:
        return ""
    text = f"{rates[candidate]:.0f}"
    if candidate == best_of(rates):
        return f"**{text}**"
    return text if len(measured[candidate]) == max(map(len, measured.values())) else f"({text})"


def _span(rounds: Sequence[float]) -> str:
    return f"{min(rounds):.0f} to {max(rounds):.0f}"


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count != 1 else ''}"


def _preliminary(findings: Findings, choice: LimitedCandidate) -> list[str]:
    """Return a line that names what few rounds decided.

    It has winners, the choice, and what they are compared with.
    """
    few = []
    for batch, rates in medians(findings).items():
        decided = dict.fromkeys((*BASELINES, best_of(rates), choice.candidate))
        counts = {candidate: len(findings.rates[batch][candidate]) for candidate in decided if candidate in rates}
        few += [
            f"{candidate.name} ({_rounds(count)} with {batch} at once)"
            for candidate, count in counts.items()
            if count < ENOUGH_ROUNDS
        ]
    if not few:
        return []
    return [
        f"PRELIMINARY: fewer than {ENOUGH_ROUNDS} rounds may be chance. Measured so rarely: {', '.join(few)}. "
        "More --num-rounds or --budget measure for longer"
    ]


def _why(choice: LimitedCandidate) -> str:
    if choice.candidate == PLAIN:
        return "Plain decode is best: no drafts are worth their cost here."
    if choice.candidate == AUTO:
        return "No fixed candidate is 1% faster than what the server chooses by itself."
    return "It is more than 1% faster than plain decode and than what the server chooses by itself."
