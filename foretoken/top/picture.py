"""Draw a gateway's figures for a terminal of 80 columns or more.

Titles are the same as on the dashboard's panels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretoken.top.figures import ControllerChoice, DrafterStatus, Figures, Latency, StepTime

# Of the operator's last requests, which come last and may lie below the terminal's last line.
MOST_REQUESTS = 5
MOST_REASONS = 3
NONE = "-"
_TITLE_WIDTH = 21


def picture(url: str, figures: Figures, ready: Mapping[str, Any], activity: Mapping[str, Any] | None) -> Group:
    """Return the picture of one moment.

    ``ready`` and ``activity`` are the bodies of ``/ready`` and ``/v1/activity``.
    """
    parts = [
        _head(url, str(ready.get("status", "")), str(ready.get("model", "")), _window(figures.seconds)),
        _titled(_load_rows(figures, _most_waiting(activity))),
        _latencies(figures.latencies),
        _drafters(figures.drafters, _reasons(ready)),
        "",
        _titled([*_step_rows(figures), *_memory_rows(figures)]),
    ]
    if activity is not None:
        parts.append(_requests(activity.get("requests", [])[:MOST_REQUESTS]))
    return Group(*parts)


def lost_picture(url: str, since: float, reason: str, retry_s: float) -> Group:
    """Return the picture of a gateway that does not answer since ``since`` (Unix seconds)."""
    line = f"no answer since {_clock(since)}, asking again every {retry_s:g} s: {_shown(reason)}"
    return Group(_head(url, "lost", "", _clock(time.time())), Text(line, "red"))


def _head(url: str, status: str, model: str, at: str) -> RenderableType:
    style = "green" if status == "ready" else "red"
    left = Text.assemble((_shown(model), "bold"), " at " if model else "", _shown(url), ": ", (_shown(status), style))
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, at)
    return grid


def _window(seconds: float) -> str:
    return f"{_clock(time.time())}, the last {seconds:.1f} s" if seconds else _clock(time.time())


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


Row = tuple[str, str | Text]


def _titled(rows: Iterable[Row]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", width=_TITLE_WIDTH)
    grid.add_column()
    for title, content in rows:
        grid.add_row(title, content)
    return grid


def _load_rows(figures: Figures, most_waiting: int) -> list[Row]:
    load, steps = figures.load, figures.steps
    room = f" of {most_waiting}" if most_waiting else ""
    return [
        ("Requests", f"running {load.running}, waiting in verifiers {load.waiting_in_verifiers}{room}"),
        (
            "In gateways",
            f"requests {load.in_gateways}, outputs without a verifier {load.waiting_for_a_verifier}",
        ),
        ("Tokens a second", f"output {_number(load.output_tokens)}, prompts {_number(load.prompt_tokens)}"),
        (
            "Requests a second",
            f"finished {_number(load.finished)}, failed {_number(load.failed)}, refused {_number(load.refused)}",
        ),
        (
            "Tokens a step",
            f"a sequence {_number(steps.tokens_of_sequence, 2)}, whole batch {_number(steps.tokens_of_batch, 2)}, "
            f"from drafts {_percent(steps.share_from_drafts)}",
        ),
    ]


def _latencies(latencies: Mapping[str, Latency]) -> RenderableType:
    table = _table("Latency", "p50", "p99")
    for title, latency in latencies.items():
        table.add_row(title, _percentile(latency.p50, latency.bounds), _percentile(latency.p99, latency.bounds))
    return Group("", table)


def _drafters(drafters: Iterable[DrafterStatus], reasons: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Drafter", min_width=10, overflow="ellipsis", no_wrap=True)
    table.add_column("state")
    table.add_column("accepted", justify="right")
    table.add_column("length", justify="right")
    table.add_column("acceptance by position")
    notes = []
    for drafter in drafters:
        name = _shown(drafter.name)
        is_attached = set(drafter.states) == {"attached"}
        table.add_row(
            name,
            Text(_states(drafter), "green" if is_attached else "red"),
            _percent(drafter.acceptance),
            _number(drafter.length, 2),
            " ".join(map(_percent, drafter.by_position)) or NONE,
        )
        if reason := reasons.get(drafter.name):
            notes.append(Text(f"{name} is not attached: {_shown(reason)}", "red"))
        if drafter.has_low_acceptance:
            notes.append(Text(f"{name}: speculation hardly works; the verifier's log names likely causes", "red"))
    return Group("", table, *notes) if table.rows else ""


def _states(drafter: DrafterStatus) -> str:
    """Return a drafter's state, counted if there are several verifiers.

    If it was attached again, say how often.
    """
    states = drafter.states
    num_verifiers = sum(states.values())
    text = ", ".join(_shown(state) if num_verifiers == 1 else f"{_shown(state)} {states[state]}" for state in states)
    is_again = "attached" in states and drafter.attaches > num_verifiers
    return f"{text} ({drafter.attaches} times)" if is_again else text


def _step_rows(figures: Figures) -> list[Row]:
    steps = figures.steps
    rows: list[Row] = [("Step, ms", NONE if steps.time is None else _step(steps.time))]
    is_named = len(figures.verifiers) > 1
    rows += [("Controller chose", _choice(choice, is_named=is_named)) for choice in figures.choices]
    if steps.without_draft:
        rows.append(("Why no draft, per s", _most_frequent(steps.without_draft)))
    if steps.not_overlapped:
        rows.append(("Why no overlap, per s", _most_frequent(steps.not_overlapped)))
    return rows


def _step(time: StepTime) -> str:
    parts = {"draft": time.draft, "hand-over": time.hand_over, "verify": time.verify, "host": time.host}
    return ", ".join(f"{name} {microseconds / 1e3:.2f}" for name, microseconds in parts.items())


def _choice(choice: ControllerChoice, *, is_named: bool) -> str:
    where = f" at {_shown(choice.verifier)}" if is_named else ""
    shape = f"{choice.nodes} nodes, {choice.levels} levels, {choice.rows:g} rows a sequence"
    rates = f"{_number(choice.tokens_per_second)} tok/s, plain {_number(choice.plain_tokens_per_second)}"
    return f"{_shown(choice.drafter)}{where}: {shape} because {_shown(choice.reason)} ({rates})"


def _most_frequent(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{_shown(reason)} {_number(rate)}" for reason, rate in list(rates.items())[:MOST_REASONS])


def _memory_rows(figures: Figures) -> list[Row]:
    useless = [f"{_shown(drafter.name)} {drafter.useless_drafts}" for drafter in figures.drafters]
    rows: list[Row] = []
    for verifier in figures.verifiers:
        where = f" {_shown(verifier.address)}" if len(figures.verifiers) > 1 else ""
        if verifier.kv_usage is None or not verifier.is_up:
            rows.append(("KV cache in use", Text(f"{NONE}{where} (the verifier does not answer)", "red")))
        else:
            rows.append(("KV cache in use", f"{verifier.kv_usage:.1%}{where}"))
    return [
        *rows,
        ("Prefix cache", f"found {_percent(figures.found_in_prefix_cache)} of prompt tokens"),
        (
            "Deaths and resumes",
            f"verifiers up {sum(verifier.is_up for verifier in figures.verifiers)} of {len(figures.verifiers)}, "
            f"outputs resumed {figures.resumes}, preemptions {figures.preemptions}",
        ),
        ("Late or bad drafts", ", ".join(useless) or NONE),
    ]


def _requests(requests: Iterable[Mapping[str, Any]]) -> RenderableType:
    table = _table("Ended", "tokens", "first", "tok/s", "accepted")
    for title in ("outcome", "drafter", "key", "API"):
        # These give way where the terminal is narrow.
        table.add_column(title, overflow="ellipsis")
    for request in requests:
        drafted, accepted = request["draft_tokens"], request["accepted_tokens"]
        first_ms = request["time_to_first_token_ms"]
        table.add_row(
            _clock(request["ended_at"]),
            f"{request['prompt_tokens']}+{request['completion_tokens']}",
            _time(None if first_ms is None else first_ms / 1e3),
            _number(_speed(request)),
            _percent(accepted / drafted if drafted else None),
            _shown(request["outcome"]),
            _shown(request["drafter"] or NONE),
            _shown(request.get("key") or NONE),
            _shown(request["api"].removeprefix("/v1/")),
        )
    return Group("", table)


def _speed(request: Mapping[str, Any]) -> float | None:
    """Return a request's tokens a second after its first, as the page at / shows them."""
    first_ms, num_tokens = request["time_to_first_token_ms"], request["completion_tokens"]
    if first_ms is None or num_tokens < 2 or request["duration_ms"] <= first_ms:
        return None
    return 1e3 * float(num_tokens - 1) / float(request["duration_ms"] - first_ms)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _reasons(ready: Mapping[str, Any]) -> dict[str, str]:
    """Return why drafters are not attached, by name."""
    drafters = [drafter for verifier in ready.get("verifiers", []) for drafter in verifier["drafters"]]
    return {drafter["name"]: drafter["reason"] for drafter in drafters if drafter["reason"]}


def _most_waiting(activity: Mapping[str, Any] | None) -> int:
    """Return how many sequences the queues of all verifiers hold; 0 if that is not known."""
    verifiers: Sequence[Mapping[str, Any]] = [] if activity is None else activity.get("verifiers", [])
    return sum(verifier.get("max_queue", 0) for verifier in verifiers)


def _number(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _time(seconds: float | None) -> str:
    """Return a time with three digits."""
    if seconds is None:
        return NONE
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percentile(seconds: float | None, bounds: tuple[float, ...]) -> str:
    """Return a percentile.

    For one in the first bucket or beyond the last, only the bound is known.
    """
    if seconds is None or not bounds:
        return _time(seconds)
    if math.isinf(seconds):
        return f"> {_time(bounds[-1])}"
    return f"< {_time(bounds[0])}" if seconds <= bounds[0] else _time(seconds)


def _shown(text: str) -> str:
    """Return a server's text without characters that move a terminal's cursor."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
