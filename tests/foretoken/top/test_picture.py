"""The picture for a terminal: 80 columns hold it, and a server's texts cannot move the cursor."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from rich.console import Console, RenderableType

from foretoken.top.figures import (
    ControllerChoice,
    DrafterStatus,
    Figures,
    Latency,
    LoadStatus,
    Steps,
    StepTime,
    VerifierStatus,
)
from foretoken.top.picture import lost_picture, picture

URL = "http://127.0.0.1:8000"
FIGURES = Figures(
    seconds=10.0,
    load=LoadStatus(3, 1, 4, 0, 812.44, 45.0, 1.2, 0.0, 0.5),
    latencies={
        "Time to first token": Latency(0.01234, 1.5, (0.001, 10.0)),
        "Time per output token": Latency(0.0015, math.inf, (0.001, 1.0)),
        "Inter-token latency": Latency(0.002, 0.003, (0.001, 1.0)),
        "Whole request": Latency(None, None, (0.01, 81.92)),
        # Within the first bucket an interpolated time would be made up.
        "Wait in the queue": Latency(0.0005, 0.00099, (0.001, 81.92)),
    },
    drafters=(
        DrafterStatus("eagle3", {"attached": 1}, 0.72, 2.444, (0.88, 0.7, 0.51), False, 3, 2),
        DrafterStatus("ngram", {"broken": 1}, None, None, (), True, 1, 0),
    ),
    choices=(ControllerChoice("eagle3", "unix:/v", 6, 5, 4.0, "drafts_pay", 800.0, 500.0),),
    steps=Steps(
        2.16,
        6.56,
        0.57,
        StepTime(300.0, 100.0, 1200.0, 500.0),
        {"a": 9.0, "b": 8.0, "c": 7.0, "d": 6.0},
        {"host_work": 1.0},
    ),
    verifiers=(VerifierStatus("unix:/v", True, 0.343),),
    found_in_prefix_cache=0.8,
    preemptions=7,
    resumes=2,
)
READY = {
    "status": "ready",
    "model": "demo",
    "verifiers": [{"drafters": [{"name": "ngram", "reason": "it lies"}, {"name": "eagle3", "reason": ""}]}],
}
REQUEST = {
    "ended_at": 1e9,
    "api": "/v1/chat/completions",
    "outcome": "ok",
    "prompt_tokens": 20000,
    "completion_tokens": 101,
    "time_to_first_token_ms": 100.0,
    "duration_ms": 2100.0,
    "draft_tokens": 100,
    "accepted_tokens": 55,
    "drafter": "eagle3",
    "key": "tenant-7",
}


def lines(drawn: RenderableType, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, markup=False, highlight=False).print(drawn)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(drawn: list[str], title: str) -> str:
    (found,) = [line.removeprefix(title) for line in drawn if line.startswith(title)]
    return " ".join(found.split())


def test_a_picture_shows_all_figures() -> None:
    drawn = lines(picture(URL, FIGURES, READY, None))
    assert max(map(len, drawn)) <= 80
    assert drawn[0].startswith(f"demo at {URL}: ready ") and drawn[0].endswith(", the last 10.0 s")
    shown = {
        "Requests  ": "running 3, waiting in verifiers 1",
        "In gateways": "requests 4, outputs without a verifier 0",
        "Tokens a second": "output 812.4, prompts 45.0",
        "Requests a second": "finished 1.2, failed 0.0, refused 0.5",
        "Tokens a step": "a sequence 2.16, whole batch 6.56, from drafts 57%",
        "Time to first token": "12.3 ms 1.5 s",
        "Time per output token": "1.5 ms > 1 s",
        "Inter-token latency": "2 ms 3 ms",
        "Whole request": "- -",
        "Wait in the queue": "< 1 ms < 1 ms",
        "eagle3 ": "attached (3 times) 72% 2.44 88% 70% 51%",
        "ngram  ": "broken - - -",
        "ngram is not attached:": "it lies",
        "ngram:": "speculation hardly works; the verifier's log names likely causes",
        "Step, ms": "draft 0.30, hand-over 0.10, verify 1.20, host 0.50",
        "Why no draft, per s": "a 9.0, b 8.0, c 7.0",
        "Why no overlap, per s": "host_work 1.0",
        "KV cache in use": "34.3%",
        "Prefix cache": "found 80% of prompt tokens",
        "Deaths and resumes": "verifiers up 1 of 1, outputs resumed 2, preemptions 7",
        "Late or bad drafts": "eagle3 2, ngram 0",
    }
    assert {title: row(drawn, title) for title in shown} == shown
    at = drawn.index(next(line for line in drawn if line.startswith("Controller chose")))
    choice = " ".join(" ".join(drawn[at : at + 2]).split())
    assert choice == (
        "Controller chose eagle3: 6 nodes, 5 levels, 4 rows a sequence because drafts_pay (800.0 tok/s, plain 500.0)"
    )


def test_the_operator_sees_the_last_requests_and_the_queues_room() -> None:
    activity = {"verifiers": [{"max_queue": 2000}, {"max_queue": 48}, {"up": False}], "requests": [REQUEST] * 9}
    drawn = lines(picture(URL, FIGURES, READY, activity))
    assert max(map(len, drawn)) <= 80
    assert row(drawn, "Requests  ") == "running 3, waiting in verifiers 1 of 2048"
    found = drawn[drawn.index("") :]
    last = [line.split()[1:8] for line in found if "20000+101" in line]
    assert last == [["20000+101", "100", "ms", "50.0", "55%", "ok", "eagle3"]] * 5


def test_a_request_without_a_token_has_no_figures() -> None:
    nothing: dict[str, Any] = REQUEST | {
        "completion_tokens": 0, "time_to_first_token_ms": None, "draft_tokens": 0, "drafter": "", "outcome": "cancelled"
    }  # fmt: skip
    del nothing["key"]
    drawn = lines(picture(URL, FIGURES, READY, {"requests": [nothing]}))
    assert drawn[-1].split()[1:8] == ["20000+0", "-", "-", "-", "cancelled", "-", "-"]


def test_several_verifiers_are_named() -> None:
    verifiers = (VerifierStatus("a:1", True, 0.5), VerifierStatus("b:1", False, None))
    drafter = dataclasses.replace(FIGURES.drafters[0], states={"attached": 1, "connecting": 1}, attaches=2)
    drawn = lines(picture(URL, dataclasses.replace(FIGURES, verifiers=verifiers, drafters=(drafter,)), READY, None))
    assert [line.split(maxsplit=4)[4] for line in drawn if line.startswith("KV cache")] == [
        "50.0% a:1",
        "- b:1 (the verifier does not answer)",
    ]
    assert row(drawn, "eagle3 ").startswith("attached 1, connecting 1 72%")
    assert any("eagle3 at unix:/v: 6 nodes" in line for line in drawn)
    assert row(drawn, "Deaths and resumes").startswith("verifiers up 1 of 2")


def test_how_often_a_drafter_was_attached_is_not_how_often_it_was_tried() -> None:
    drafter = dataclasses.replace(FIGURES.drafters[0], states={"connecting": 1}, attaches=2)
    drawn = lines(picture(URL, dataclasses.replace(FIGURES, drafters=(drafter,)), READY, None))
    assert row(drawn, "eagle3 ").startswith("connecting 72%")


@pytest.mark.parametrize("ready", [{}, {"status": "not ready"}])
def test_a_server_that_shows_nothing_yet(ready: dict[str, Any]) -> None:
    empty = Figures(
        0.0, LoadStatus(0, 0, 0, 0, *[None] * 5), {}, (), (), Steps(None, None, None, None, {}, {}), (), None, 0, 0
    )
    drawn = lines(picture(URL, empty, ready, None))
    assert row(drawn, "Tokens a second") == "output -, prompts -"
    assert row(drawn, "Step, ms") == "-"
    assert "the last" not in drawn[0]


def test_a_servers_texts_do_not_move_the_cursor() -> None:
    drafter = dataclasses.replace(FIGURES.drafters[0], name="\x1b[2Jx")
    evil = {"status": "ready\x1b[1m", "model": "\x07m[red]", "verifiers": []}
    drawn = "".join(lines(picture(URL, dataclasses.replace(FIGURES, drafters=(drafter,)), evil, None)))
    assert "\x1b" not in drawn and "\x07" not in drawn
    # Nor are they markup.
    assert "m[red] at " in drawn


def test_a_gateway_that_is_lost() -> None:
    drawn = lines(lost_picture(URL, 1e9, "nothing answers at\n" + URL, 2.0))
    assert drawn[0].startswith(f"{URL}: lost ")
    said = " ".join(drawn[1:])
    assert said.startswith("no answer since ") and "asking again every 2 s: nothing answers at" in said
