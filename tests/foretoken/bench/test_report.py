"""Tables, ratios and the picture of made-up rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from typing import Any

import pytest

from foretoken.bench import report
from foretoken.bench.load import Answer
from foretoken.bench.measures import figures_of


def row(server: str = "first", load: str = "4", number: int = 0, seconds: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return the row of one request: 11 tokens, the first after half of the time."""
    answers = [Answer(0.0, seconds / 2, seconds, 100, 25, 11, ())]
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


def test_a_table_has_a_line_for_each_load_and_only_the_columns_that_say_something() -> None:
    table = report.to_table([row(), row(load="8", seconds=2.0), FAILED]).splitlines()
    titles = cells(table[0])
    assert "server" not in titles and "good requests/s" not in titles
    first = dict(zip(titles, cells(table[2]), strict=True))
    assert (first["load"], first["tok/s"], first["TTFT ms"]) == ("4", "11", "500.0 / 500.0 / 500.0")
    assert (first["TPOT ms"], first["end to end ms"]) == ("50.00 / 50.00 / 50.00", "1000 / 1000 / 1000")
    assert (first["interactivity tok/s"], first["cached"], first["tokens a step"]) == ("11.0 / 11.0 / 11.0", "25%", "")
    assert len(table) == 4 and len({len(line) for line in table}) == 1
    titles = cells(report.to_table([row(has_bounds=True), row("second")]).splitlines()[0])
    assert "server" in titles and "good requests/s" in titles


def test_rounds_are_shown_by_their_median_and_range() -> None:
    speculation = {"tokens_per_step": 2.0, "acceptance": (), "drafters": (), "source": "x"}
    rows = [row(number=number, seconds=seconds) for number, seconds in enumerate((1.0, 4.0, 2.0))]
    rows[0]["speculation"] = speculation
    (found,) = report.summaries(rows)
    assert (found["tokens_per_s"], found["least_tokens_per_s"], found["most_tokens_per_s"]) == (5.5, 2.75, 11.0)
    assert (found["ttft_p50_ms"], found["num_rounds"], found["tokens_per_step"]) == (1000, 3, 2.0)
    assert "6 (3 to 11)" in report.to_table(rows)


def test_ratios_are_of_the_pairs_and_not_of_the_medians() -> None:
    # The machine slows down from round to round; the second server always takes half the time.
    rows = []
    for number, seconds in enumerate((1.0, 3.0, 10.0)):
        rows += [row("first", number=number, seconds=seconds), row("second", number=number, seconds=seconds / 2)]
    rows[-1] |= {"tokens_per_s": 5.5}
    found = {ratio.figure: ratio for ratio in report.ratios(rows, ["first", "second"])}
    assert found["tokens_per_s"].ratios == pytest.approx((0.5, 0.5, 0.2)) and found["tokens_per_s"].median == 0.5
    assert found["ttft_p50_ms"].median == pytest.approx(2.0)
    text = report.to_ratios(list(found.values()), ["first", "second"])
    assert text.startswith("first / second:") and "0.500 (0.200 to 0.500)" in text
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
    assert {"<a>, at once", "b, at once", "b, arrivals"} <= {*words}
    assert "<a>" not in report.draw([row("<a>")])
    with pytest.raises(ValueError, match="nothing to draw"):
        report.draw([FAILED])
