"""Show measurements: tables for a terminal or a README, ratios of two servers, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.bench.picture import Mark, Picture
from foretoken.bench.sweep import Row

FORMAT = 1
# Of a comparison.
COMPARED = {
    "tokens_per_s": "tok/s",
    "requests_per_s": "requests/s",
    "ttft_p50_ms": "TTFT p50",
    "tpot_p50_ms": "TPOT p50",
    "e2e_p50_ms": "end to end p50",
    "interactivity_p50": "interactivity p50",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of the first server over that of the second: one ratio for each round."""

    load: str
    figure: str
    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)


def measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with at least one answer."""
    return [row for row in rows if row["num_sent"] > row["num_failed"]]


def summaries(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each load and server: the median of each number over the rounds."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in measured(rows):
        groups.setdefault((row["load"], row["server"]), []).append(row)
    found = []
    for members in groups.values():
        first = members[0]
        numbers = {
            key for key, value in first.items() if isinstance(value, int | float) and not isinstance(value, bool)
        }
        medians = {key: statistics.median(row[key] for row in members) for key in numbers}
        rates = [row["tokens_per_s"] for row in members]
        steps = [row["speculation"]["tokens_per_step"] for row in members if row["speculation"]]
        found.append(
            first
            | medians
            | {
                "num_rounds": len(members),
                "least_tokens_per_s": min(rates),
                "most_tokens_per_s": max(rates),
                "tokens_per_step": statistics.median(steps) if steps else None,
                "num_failed": sum(row["num_failed"] for row in members),
            }
        )
    return found


def ratios(rows: Sequence[Row], names: Sequence[str]) -> list[Ratio]:
    """Return the ratios of two servers, ``names``, at each load; rounds without answers are left out."""
    if len(names) != 2:
        return []
    by_round = {(row["load"], row["round"], row["server"]): row for row in measured(rows)}
    found = []
    for load in dict.fromkeys(row["load"] for row in rows):
        numbers = sorted({number for of_load, number, _ in by_round if of_load == load})
        pairs = [tuple(by_round.get((load, number, name)) for name in names) for number in numbers]
        for figure in COMPARED:
            values = tuple(a[figure] / b[figure] for a, b in pairs if a and b and b[figure])
            if values:
                found.append(Ratio(load, figure, values))
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each kind of failed requests of a row."""
    return [
        f"{row['server']}, {row['load']}: {count} of {row['num_sent']} requests failed: {reason}"
        for row in rows
        for reason, count in row["failures"].items()
    ]


def bottlenecks(rows: Sequence[Row]) -> list[str]:
    """Return a line for each measurement that the clients may have limited."""
    return [
        f"{row['server']}, {row['load']}: THE CLIENT MAY BE THE LIMIT: {'; '.join(row['client_limits'])}"
        for row in rows
        if row["client_limits"]
    ]


_Cell = Callable[[Row], str]
# Title and content of the columns.
_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("server", lambda row: str(row["server"])),
    ("load", lambda row: str(row["load"])),
    ("requests", lambda row: f"{row['num_sent']:.0f}" + (f", {row['num_failed']} failed" if row["num_failed"] else "")),
    ("tok/s", lambda row: f"{row['tokens_per_s']:.0f}" + _spread(row)),
    ("requests/s", lambda row: f"{row['requests_per_s']:.2f}"),
    ("TTFT ms", lambda row: _percentiles(row, "ttft", "_ms", 1)),
    ("TPOT ms", lambda row: _percentiles(row, "tpot", "_ms", 2)),
    ("end to end ms", lambda row: _percentiles(row, "e2e", "_ms", 0)),
    ("interactivity tok/s", lambda row: _percentiles(row, "interactivity", "", 1)),
    ("good requests/s", lambda row: f"{row['good_requests_per_s']:.2f} ({row['good_share']:.0%})"),
    ("tokens a step", lambda row: "" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}"),
    ("cached", lambda row: f"{row['num_cached_tokens'] / max(row['num_prompt_tokens'], 1):.0%}"),
    ("client busy, late ms", lambda row: f"{row['client_busy']:.0%}, {row['client_lag_p99_ms']:.1f}"),
)


def to_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each load and server; p50 / p90 / p99 where there are three numbers."""
    found = summaries(rows)
    left_out = set()
    if len({row["server"] for row in found}) < 2:
        left_out.add("server")
    if not any(row["has_bounds"] for row in found):
        left_out.add("good requests/s")
    columns = [(title, cell) for title, cell in _COLUMNS if title not in left_out]
    return _table([title for title, _ in columns], [[cell(row) for _, cell in columns] for row in found])


def to_ratios(found: Sequence[Ratio], names: Sequence[str]) -> str:
    """Return a table of two servers' ratios: median (least to most)."""
    loads = list(dict.fromkeys(ratio.load for ratio in found))
    cells = {
        (ratio.load, ratio.figure): f"{ratio.median:.3f} ({min(ratio.ratios):.3f} to {max(ratio.ratios):.3f})"
        for ratio in found
    }
    lines = [[load, *(cells.get((load, figure), "") for figure in COMPARED)] for load in loads]
    return f"{' / '.join(names)}:\n\n" + _table(["load", *COMPARED.values()], lines)


def to_details(rows: Sequence[Row]) -> str:
    """Return what servers say about speculation, and tables of categories; empty without either."""
    parts = []
    for row in measured(rows):
        if row["round"]:
            continue
        title = f"{row['server']}, {row['load']}"
        speculation = row["speculation"]
        if speculation and speculation["acceptance"]:
            shares = ", ".join(f"{share:.0%}" for share in speculation["acceptance"])
            parts.append(f"{title}: accepted by position: {shares} (from {speculation['source']})")
        if speculation and speculation["drafters"]:
            counts = ", ".join(
                f"{each['name']} {each['num_accepted_tokens']} of {each['num_draft_tokens']}"
                for each in speculation["drafters"]
            )
            parts.append(f"{title}: accepted draft tokens: {counts}")
        if row["categories"]:
            lines = [
                [
                    name,
                    str(figures["num_requests"]),
                    f"{figures['ttft_p50_ms']:.1f}",
                    f"{figures['tpot_p50_ms']:.2f}",
                    "" if figures["tokens_per_step"] is None else f"{figures['tokens_per_step']:.2f}",
                ]
                for name, figures in row["categories"].items()
            ]
            titles = ["category", "requests", "TTFT p50 ms", "TPOT p50 ms", "tokens a step"]
            parts.append(f"{title}:\n\n{_table(titles, lines)}")
    return "\n\n".join(parts)


def to_content(rows: Sequence[Row], names: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything for a JSON file."""
    found = [asdict(ratio) | {"median": ratio.median} for ratio in ratios(rows, names)]
    return {"format": FORMAT, **facts, "rows": list(rows), "ratios": found}


def draw(rows: Sequence[Row]) -> str:
    """Return the picture of all loads as SVG text. Raises ValueError without answers."""
    found = summaries(rows)
    if not found:
        raise ValueError("no request was answered: there is nothing to draw")
    has_names = len({row["server"] for row in found}) > 1
    lines: dict[str, list[Mark]] = {}
    for row in found:
        kind = "arrivals" if row["request_rate"] else "at once"
        name = f"{row['server']}, {kind}" if has_names else kind
        lines.setdefault(name, []).append(Mark(row["interactivity_p50"], row["tokens_per_s"], row["load"]))
    title = "Output tok/s of the server against tok/s of one user"
    return Picture(title, "tok/s of one user (1 / median time per token of whole requests)", lines, {}).svg()


def _percentiles(row: Row, name: str, unit: str, digits: int) -> str:
    return " / ".join(f"{row[f'{name}_p{n}{unit}']:.{digits}f}" for n in (50, 90, 99))


def _spread(row: Row) -> str:
    if row["num_rounds"] == 1:
        return ""
    return f" ({row['least_tokens_per_s']:.0f} to {row['most_tokens_per_s']:.0f})"


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned."""
    widths = [max(len(line[index]) for line in (titles, *lines)) for index in range(len(titles))]
    rule = ["-" * (width - 1) + ":" for width in widths]
    rows = [titles, rule, *lines]
    return "\n".join(
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows
    )
