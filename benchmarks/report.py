"""Judge measurements against the bars, and report them as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.figures import Timing, decode_rate, median
from benchmarks.measure import Pair, ReferencePass, TimedCompletion


@dataclass(frozen=True, slots=True)
class Bar:
    """The limit that a figure must hold."""

    kind: Literal["at least", "above", "below"]
    limit: float

    def holds(self, value: float) -> bool:
        """Return whether a value holds the bar; NaN never does."""
        if self.kind == "below":
            return value < self.limit
        return value > self.limit if self.kind == "above" else value >= self.limit


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its formula and its bar. ``value`` is None if this run did not measure it."""

    name: str
    value: float | None
    unit: str
    formula: str
    bar: Bar
    # The values that a median was taken of.
    values: tuple[float, ...] = ()

    @property
    def passed(self) -> bool | None:
        """Whether the figure holds its bar; None without a value."""
        return None if self.value is None else self.bar.holds(self.value)


def missed_bars(figures: Sequence[Figure]) -> list[str]:
    """Return a line for each measured figure that misses its bar."""
    return [
        f"{figure.name}: {figure.value:.3g} {figure.unit}, must be {figure.bar.kind} {figure.bar.limit:g}"
        for figure in figures
        if figure.passed is False
    ]


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One way of decoding, as a row of a table."""

    name: str
    tokens_per_s: float
    first_token_ms: float | None
    tokens_per_step: float | None
    ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in the report. ``judged`` is false if the run is too short for the bars."""

    facts: dict[str, str]
    cold: list[ReportRow]
    random: list[ReportRow]
    warm: list[ReportRow]
    figures: list[Figure]
    notes: list[str]
    judged: bool
    mismatches: list[str] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Return the reasons why the run fails.

        Texts must always be equal; bars count in a judged run.
        """
        return [*self.mismatches, *(missed_bars(self.figures) if self.judged else ())]


def pair_rows(pairs: Sequence[Pair]) -> list[ReportRow]:
    """Return rows for plain and n-gram decoding over all pairs."""
    plain = [sample for pair in pairs for sample in pair.plain]
    speculative = [sample for pair in pairs for sample in pair.speculative]
    ratio = median([pair.ratio for pair in pairs])
    return [_row("plain", plain, 1.0), _row("n-gram", speculative, ratio)]


def _row(name: str, samples: Sequence[TimedCompletion], ratio: float) -> ReportRow:
    timings = [sample.timing for sample in samples]
    tokens_per_step = sum(sample.tokens_per_step for sample in samples) / len(samples)
    return ReportRow(name, decode_rate(timings), _first_token_ms(timings), tokens_per_step, ratio)


def reference_rows(passes: Sequence[ReferencePass], plain: ReportRow) -> list[ReportRow]:
    """Return rows for the engine alone and transformers, with ratios to the served plain runs."""
    rows = []
    for name, timings_of in (("engine alone, in process", _engine), ("transformers generate", _transformers)):
        timings = [timing for one in passes for timing in timings_of(one)]
        ratio = median([decode_rate(timings_of(one)) / decode_rate(one.served) for one in passes])
        rows.append(ReportRow(name, decode_rate(timings), _first_token_ms(timings), plain.tokens_per_step, ratio))
    return rows


def concurrent_row(num_streams: int, rates: Sequence[float], ratio: float) -> ReportRow:
    return ReportRow(f"plain, {num_streams} streams at once", median(rates), None, None, ratio)


def _engine(one: ReferencePass) -> list[Timing]:
    return one.engine


def _transformers(one: ReferencePass) -> list[Timing]:
    return one.transformers


def _first_token_ms(timings: Sequence[Timing]) -> float:
    return 1e3 * median([timing.first_token_s for timing in timings])


def mismatch_lines(workload: str, pairs: Sequence[Pair]) -> list[str]:
    """Return a line for each prompt whose texts differ within a pair or between pairs."""
    lines = []
    for number, pair in enumerate(pairs, start=1):
        lines += [f"{workload}, pair {number}, prompt {i}: n-gram text is not plain text" for i in pair.mismatches()]
        if [sample.text for sample in pair.plain] != [sample.text for sample in pairs[0].plain]:
            lines.append(f"{workload}, pair {number}: plain text is not that of pair 1")
    return lines


def to_json(report: Report) -> str:
    """Return the whole report as JSON. Figures have ``passed`` beside the bar."""
    value = asdict(report)
    for entry, figure in zip(value["figures"], report.figures, strict=True):
        entry["passed"] = figure.passed if report.judged else None
    value["failures"] = report.failures()
    return json.dumps(value, indent=1) + "\n"


def to_markdown(report: Report) -> str:
    """Return tables and notes for a terminal or a README."""
    parts = ["\n".join(f"- {name}: {text}" for name, text in report.facts.items())]
    parts.append("Cold, held-out code, greedy:\n\n" + _rows_table(report.cold, "vs plain"))
    parts.append("Cold, random identifiers, temperature 1.0:\n\n" + _rows_table(report.random, "vs plain"))
    parts.append("Warm history (no bar counts it):\n\n" + _rows_table(report.warm, "vs plain"))
    parts.append(figures_table(report.figures, judged=report.judged))
    parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def _rows_table(rows: Sequence[ReportRow], ratio_title: str) -> str:
    lines = [f"| | tok/s | first token, ms | tokens a step | {ratio_title} |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        first = "" if row.first_token_ms is None else f"{row.first_token_ms:.1f}"
        per_step = "" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}"
        lines.append(f"| {row.name} | {row.tokens_per_s:.0f} | {first} | {per_step} | {row.ratio:.2f}x |")
    return "\n".join(lines)


def figures_table(figures: Sequence[Figure], *, judged: bool) -> str:
    """Return a table of figures with bar, formula and, in a judged run, verdict."""
    lines = ["| figure | value | bar | | formula |", "| --- | ---: | ---: | --- | --- |"]
    for figure in figures:
        value = "not measured" if figure.value is None else f"{figure.value:.3g} {figure.unit}"
        spread = f" ({min(figure.values):.3g} to {max(figure.values):.3g})" if len(figure.values) > 1 else ""
        verdict = {True: "pass", False: "**FAIL**", None: ""}[figure.passed if judged else None]
        bar = f"{figure.bar.kind} {figure.bar.limit:g}"
        lines.append(f"| {figure.name} | {value}{spread} | {bar} | {verdict} | {figure.formula} |")
    return "\n".join(lines)
