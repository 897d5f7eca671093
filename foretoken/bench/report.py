"""Show measurements: tables for a terminal or a README, ratios of two servers, a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.bench.picture import Mark, Picture
from foretoken.bench.sweep import Row

FORMAT = 1
# Of a comparison: title, and whether more is better.
COMPARED = {
    "tokens_per_s": ("tok/s", True),
    "requests_per_s": ("requests/s", True),
    "ttft_p50_ms": ("TTFT p50", False),
    "tpot_p50_ms": ("TPOT p50", False),
    "e2e_p50_ms": ("end to end p50", False),
    "interactivity_p50": ("interactivity p50", True),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of the first server divided by the second server's: one ratio for each round."""

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
    """Return the ratios of two servers, ``names``, at each load.

    Rounds without answers are left out.
    """
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


def to_table(rows: Sequence[Row], width: int) -> str:
    """Return a table with a line for each figure and a column for each load and server.

    ``width``: characters of a line. Columns that do not fit follow in further tables.
    """
    found = summaries(rows)
    left_out = set()
    if len({row["server"] for row in found}) < 2:
        left_out.add("server")
    if all(row["num_rounds"] == 1 for row in found):
        left_out |= {"tok/s, least", "tok/s, most"}
    if not any(row["has_bounds"] for row in found):
        left_out.add("good requests/s")
    if not any(row["tokens_per_step"] is not None for row in found):
        left_out.add("tokens a step")
    lines = [(title, cell) for title, cell in _lines() if title not in left_out]
    return _folded([title for title, _ in lines], [[cell(row) for _, cell in lines] for row in found], width)


def to_ratios(found: Sequence[Ratio], names: Sequence[str], width: int) -> str:
    """Return a table of two servers' ratios: median (least to most); ``width`` as in to_table."""
    loads = list(dict.fromkeys(ratio.load for ratio in found))
    cells = {
        (ratio.load, ratio.figure): f"{ratio.median:.3f} ({min(ratio.ratios):.3f} to {max(ratio.ratios):.3f})"
        for ratio in found
    }
    columns = [[load, *(cells.get((load, figure), "") for figure in COMPARED)] for load in loads]
    titles = [f"{title} ({'higher' if more else 'lower'})" for title, more in COMPARED.values()]
    first, second = names
    head = (
        f"{first} / {second}: the figure of {first} divided by the figure of {second}, "
        "median of the rounds (least to most).",
        f"(higher): {first} is better if the ratio is above 1. (lower): if it is below 1.",
    )
    lines = [wrapped for line in head for wrapped in textwrap.wrap(line, width)]
    return "\n".join(lines) + "\n\n" + _folded(["load", *titles], columns, width)


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
        # What the numbers beside the line's points count.
        kind = "requests a second" if row["request_rate"] else "requests at once"
        name = f"{row['server']} server, {kind}" if has_names else kind
        lines.setdefault(name, []).append(Mark(row["interactivity_p50"], row["tokens_per_s"], row["load"]))
    title = "Output tok/s of the server against tok/s of one user"
    x_title = "tok/s of one user (1 / median time per token of whole requests)"
    return Picture(title, x_title, "output tok/s of the server", lines, {}).svg()


def _lines() -> list[tuple[str, _Cell]]:
    """Return title and content of a table's lines."""
    return [
        ("load", lambda row: str(row["load"])),
        ("server", lambda row: str(row["server"])),
        ("requests", lambda row: f"{row['num_sent']:.0f}"),
        ("failed", lambda row: f"{row['num_failed']:.0f}"),
        ("tok/s", lambda row: f"{row['tokens_per_s']:.0f}"),
        ("tok/s, least", lambda row: f"{row['least_tokens_per_s']:.0f}"),
        ("tok/s, most", lambda row: f"{row['most_tokens_per_s']:.0f}"),
        ("requests/s", lambda row: f"{row['requests_per_s']:.2f}"),
        *_percentiles("TTFT", "ttft", "ms", 1),
        *_percentiles("TPOT", "tpot", "ms", 2),
        *_percentiles("end to end", "e2e", "ms", 0),
        *_percentiles("interactivity", "interactivity", "tok/s", 1),
        ("good requests/s", lambda row: f"{row['good_requests_per_s']:.2f} ({row['good_share']:.0%})"),
        ("tokens a step", lambda row: "" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}"),
        ("cached", lambda row: f"{row['num_cached_tokens'] / max(row['num_prompt_tokens'], 1):.0%}"),
        ("client busy", lambda row: f"{row['client_busy']:.0%}"),
        ("client late p99, ms", lambda row: f"{row['client_lag_p99_ms']:.1f}"),
    ]


def _percentiles(title: str, name: str, unit: str, digits: int) -> list[tuple[str, _Cell]]:
    def cell(key: str) -> _Cell:
        return lambda row: f"{row[key]:.{digits}f}"

    suffix = "_ms" if unit == "ms" else ""
    return [(f"{title} p{n}, {unit}", cell(f"{name}_p{n}{suffix}")) for n in (50, 90, 99)]


def _folded(titles: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> str:
    """Return Markdown tables of at most ``width`` characters.

    Each has the titles and some of the columns.

    A column that is wider than that has a table of its own.
    """
    left = max(map(len, titles))
    blocks: list[list[Sequence[str]]] = []
    used = width
    for column in columns:
        size = max(map(len, column)) + len(" | ")
        if used + size > width:
            blocks.append([])
            used = len("| ") + left + len(" |")
        blocks[-1].append(column)
        used += size
    tables = []
    for block in blocks:
        first, *lines = [list(cells) for cells in zip(titles, *block, strict=True)]
        tables.append(_table(first, lines, is_titled=True))
    return "\n\n".join(tables)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], *, is_titled: bool = False) -> str:
    """Return a Markdown table whose columns are aligned.

    ``is_titled``: the first column has titles, which begin at the left.
    """
    widths = [max(len(line[index]) for line in (titles, *lines)) for index in range(len(titles))]
    rule = ["-" * (width - 1) + ":" for width in widths]
    if is_titled:
        rule[0] = "-" * widths[0]
    rows = [titles, rule, *lines]

    def padded(cells: Sequence[str]) -> list[str]:
        found = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return [cells[0].ljust(widths[0]), *found[1:]] if is_titled else found

    return "\n".join("| " + " | ".join(padded(row)) + " |" for row in rows)
