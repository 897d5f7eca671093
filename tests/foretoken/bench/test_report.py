"""Tables, ratios and the picture of made-up rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from typing import Any

import pytest

from foretoken.bench import report
from foretoken.bench.load import CompletedRequest
from foretoken.bench.measures import figures_of


def row(server: str = "first", load: str = "4", number: int = 0, seconds: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return the row of one request: 11 tokens, the first after half of the time."""
    answers = [CompletedRequest(0.0, seconds / 2, seconds, 100, 25, 11, ())]
    return {
        "server": server,
        "load": load,
        "round": number,
        "concurrency": 4,
        "request_rate": 0.0,
        "num_sent": 1,
        "num_failed": 0,
        "failures": {},
        **figures_of(answers),
        "has_bounds": False,
        "speculation": None,
        "categories": {},
        "client_busy": 0.2,
        "client_lag_p99_ms": 1.0,
        "client_limits": [],
    } | fields


FAILED = {"server": "first", "load": "9", "round": 0, "num_sent": 2, "num_failed": 2, "failures": {"cut off": 2}}
FAILED |= {"client_limits": [], "has_bounds": False, "categories": {}, "speculation": None}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def columns(table: str) -> list[dict[str, str]]:
    """Return the loads' figures by title, of all tables."""
    found = []
    for block in table.split("\n\n"):
        titles, *values = zip(*(cells(line) for line in block.splitlines()), strict=True)
        found += [dict(zip(titles, column, strict=True)) for column in values]
    return found


def test_a_table_has_a_column_for_each_load_and_only_the_lines_that_say_something() -> None:
    table = report.to_table([row(), row(load="8", seconds=2.0), FAILED], 80)
    first, second = columns(table)
    assert not {"server", "good requests/s", "tokens a step"} & first.keys()
    assert (first["load"], first["tok/s"], second["load"], second["tok/s"]) == ("4", "11", "8", "6")
    assert [first[f"TTFT p{n}, ms"] for n in (50, 90, 99)] == ["500.0"] * 3
    assert [first[f"TPOT p{n}, ms"] for n in (50, 90, 99)] == ["50.00"] * 3
    assert (first["end to end p50, ms"], first["interactivity p50, tok/s"]) == ("1000", "11.0")
    assert (first["requests"], first["failed"], first["cached"], first["client busy"]) == ("1", "0", "25%", "20%")
    assert len({len(line) for line in table.splitlines()}) == 1
    (first, second) = columns(report.to_table([row(has_bounds=True), row("second")], 80))
    assert (first["server"], second["server"], first["good requests/s"]) == ("first", "second", "0.00 (0%)")


@pytest.mark.parametrize(("width", "at_once"), [(80, 5), (100, 7), (40, 1), (10, 1)])
def test_a_table_is_as_wide_as_the_terminal_at_most(width: int, at_once: int) -> None:
    rows = [row(load=str(number), number=turn, seconds=0.001) for number in range(1, 10) for turn in range(2)]
    tables = report.to_table(rows, width).split("\n\n")
    lines = [line for table in tables for line in table.splitlines()]
    assert max(map(len, lines)) <= max(width, 40)
    found = columns("\n\n".join(tables))
    assert [each["load"] for each in found] == [str(number) for number in range(1, 10)]
    assert max(len(cells(table.splitlines()[0])) - 1 for table in tables) == at_once
    ratios = [report.Ratio(str(load), figure, (1.0, 1.5)) for load in range(4) for figure in report.COMPARED]
    title, *tables = report.to_ratios(ratios, ["first", "second"], 80).split("\n\n")
    assert all(len(line) <= 80 for part in (title, *tables) for line in part.splitlines())
    assert [each["load"] for each in columns("\n\n".join(tables))] == ["0", "1", "2", "3"] and len(tables) == 2


def test_rounds_are_shown_by_their_median_and_range() -> None:
    speculation = {"tokens_per_step": 2.0, "acceptance": (), "drafters": (), "source": "x"}
    rows = [row(number=number, seconds=seconds) for number, seconds in enumerate((1.0, 4.0, 2.0))]
    rows[0]["speculation"] = speculation
    (found,) = report.summaries(rows)
    assert (found["tokens_per_s"], found["least_tokens_per_s"], found["most_tokens_per_s"]) == (5.5, 2.75, 11.0)
    assert (found["ttft_p50_ms"], found["num_rounds"], found["tokens_per_step"]) == (1000, 3, 2.0)
    (column,) = columns(report.to_table(rows, 80))
    assert [column[title] for title in ("tok/s", "tok/s, least", "tok/s, most")] == ["6", "3", "11"]


def test_ratios_are_of_the_pairs_and_not_of_the_medians() -> None:
    # The machine slows down from round to round; the second server always takes half the time.
    rows = []
    for number, seconds in enumerate((1.0, 3.0, 10.0)):
        rows += [row("first", number=number, seconds=seconds), row("second", number=number, seconds=seconds / 2)]
    rows[-1] |= {"tokens_per_s": 5.5}
    found = {ratio.figure: ratio for ratio in report.ratios(rows, ["first", "second"])}
    assert found["tokens_per_s"].ratios == pytest.approx((0.5, 0.5, 0.2)) and found["tokens_per_s"].median == 0.5
    assert found["ttft_p50_ms"].median == pytest.approx(2.0)
    text = report.to_ratios(list(found.values()), ["first", "second"], 80)
    assert (
        text.startswith("first / second: the figure of first divided by the figure of second")
        and "0.500 (0.200 to 0.500)" in text
    )
    (column,) = columns(text.partition("\n\n")[2])
    higher = {"tok/s (higher)", "requests/s (higher)", "interactivity p50 (higher)"}
    assert {title for title in column if title.endswith(")")} == higher | {
        "TTFT p50 (lower)",
        "TPOT p50 (lower)",
        "end to end p50 (lower)",
    }
    assert column["TTFT p50 (lower)"].startswith("2.000") and "first is better if the ratio is above 1" in text
    assert report.ratios(rows, ["first"]) == []


def test_a_round_without_answers_has_no_ratio() -> None:
    rows = [row("first"), row("second"), row("first", number=1), row("second", number=1)]
    rows[3] |= {"num_failed": 1}
    found = report.ratios(rows, ["first", "second"])
    assert {len(ratio.ratios) for ratio in found} == {1}


def test_failures_and_bottlenecks_have_a_line_each() -> None:
    assert report.failures([row(), FAILED]) == ["first, 9: 2 of 2 requests failed: cut off"]
    limited = row(client_limits=["a client process took 99% of a core", "late"])
    assert report.bottlenecks([row(), limited]) == [
        "first, 4: THE CLIENT MAY BE THE LIMIT: a client process took 99% of a core; late"
    ]


def test_details_are_of_the_first_round() -> None:
    speculation = {
        "source": "answers",
        "tokens_per_step": 2.5,
        "acceptance": [0.9, 0.6],
        "drafters": [{"name": "eagle3", "num_draft_tokens": 30, "num_accepted_tokens": 20}],
    }
    figures = {"num_requests": 3, "ttft_p50_ms": 1.0, "tpot_p50_ms": 2.0, "tokens_per_step": None}
    first = row(speculation=speculation, categories={"math": figures})
    text = report.to_details([first, first | {"round": 1}])
    assert text.count("accepted by position: 90%, 60% (from answers)") == 1
    assert "accepted draft tokens: eagle3 20 of 30" in text
    assert cells(text.splitlines()[-1]) == ["math", "3", "1.0", "2.00", ""]
    assert report.to_details([row(), FAILED]) == ""


def test_json_has_rows_and_ratios() -> None:
    content = report.to_content([row("a"), row("b", seconds=2.0)], ["a", "b"], {"version": "0"})
    found = json.loads(json.dumps(content))
    assert (found["format"], found["version"], len(found["rows"])) == (1, "0", 2)
    assert {"load": "4", "figure": "tokens_per_s", "ratios": [2.0], "median": 2.0} in found["ratios"]


def test_the_picture_has_a_line_for_each_server_and_kind_and_a_mark_for_each_load() -> None:
    text = report.draw([row("<a>"), row("<a>", load="8"), row("b"), row("b", load="3/s", request_rate=3.0), FAILED])
    root = xml.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 3
    words = [element.text for element in root.iter(f"{space}text")]
    assert words.count("4") == 2 and words.count("8") == 1 and words.count("3/s") == 1
    assert {"<a> server, requests at once", "b server, requests at once", "b server, requests a second"} <= {*words}
    assert {"output tok/s of the server", "tok/s of one user (1 / median time per token of whole requests)"} <= {*words}
    assert "<a>" not in report.draw([row("<a>")])
    with pytest.raises(ValueError, match="nothing to draw"):
        report.draw([FAILED])
