"""A run's findings for people and as JSON, and whether the run is good."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.killer import Blow
from tests.chaos.load import Tally
from tests.chaos.pauses import Waits, after_deaths, between_tokens
from tests.chaos.resources import Holding
from tests.chaos.schedule import DRAFTERS, Process
from tests.chaos.watcher import Sample

DRAFTER_BAR_S = 1.0
VERIFIER_BAR_S = 10.0
SHOWN_FAILURES = 10
TRACEBACK = "Traceback (most recent call last)"
SHOWN_OF_TRACEBACK = 3000
OUTCOMES = ("done", "dropped", "sent again", "failed", "differing")


@dataclass(slots=True)
class Run:
    """Everything measured. ``failures``: faults other than wrong answers and leaks."""

    seconds: float
    seed: int
    num_requests: int
    took_s: float
    blows: Sequence[Blow]
    num_scheduled: dict[Process, int]
    tally: Tally
    acceptance_before: tuple[int, int]
    acceptance: tuple[int, int]
    num_proofs: int
    last_sample: Sample | None
    num_requests_at_end: float
    holdings_before: dict[Process, Holding]
    holdings: dict[Process, Holding]
    # Stack traces in the log, and the first one.
    tracebacks: tuple[int, str]
    device: str
    # Steps, and overlapped ones among them.
    steps: tuple[int, int]
    stop_s: float | None = None
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def deaths(self, process: Process) -> int:
        """Return the number of deaths that another process of the name followed."""
        return sum(
            blow.strike.process == process and blow.strike.is_death and blow.replaced_at is not None
            for blow in self.blows
        )

    def waits(self) -> dict[str, Waits]:
        """Return the clients' pauses by their starting point."""
        lines, blows = self.tally.timelines, self.blows
        return {
            "between two tokens of a stream": between_tokens(lines),
            "after a drafter's death": after_deaths(lines, blows, "drafter"),
            "after a head's death": after_deaths(lines, blows, "head"),
            "after a verifier's death": after_deaths(lines, blows, "verifier"),
            "  SIGKILL": after_deaths(lines, blows, "verifier", ("kill",)),
            "  SIGSTOP, from its discovery": after_deaths(lines, blows, "verifier", ("stop",)),
            "  SIGSTOP, from the signal": after_deaths(lines, blows, "verifier", ("stop",), since_signal=True),
        }

    def faults(self, *, bars: bool) -> list[str]:
        """Return everything that makes the run fail. ``bars``: judge the times too."""
        found = [*self.failures, *self.leaks, *self.tally.failures, *self._count_faults(), *self._end_faults()]
        return found + (self._bar_faults() if bars else [])

    def _count_faults(self) -> list[str]:
        found = [
            f"{self.deaths(process)} deaths of the {process}, {scheduled} scheduled"
            for process, scheduled in self.num_scheduled.items()
            if self.deaths(process) < scheduled
        ]
        if self.tally.num_server_errors:
            found.append(f"{self.tally.num_server_errors} answers with a status of 500 or more")
        if not self.tally.num_tokens_compared:
            found.append("no token was compared")
        if self.device == "cuda" and not self.steps[1]:
            found.append(f"none of {self.steps[0]} steps overlapped")
        if not self.num_proofs and any(self.num_scheduled.get(name) for name in ("verifier", *DRAFTERS)):
            found.append("no draft was accepted after any death")
        if self.tracebacks[0]:
            found.append(f"{self.tracebacks[0]} stack traces in the log, first:\n{self.tracebacks[1]}")
        return found

    def _end_faults(self) -> list[str]:
        sample = self.last_sample
        if sample is None:
            return ["the verifier does not answer at the end"]
        found = []
        if not sample.is_idle:
            lost = sample.num_blocks - sample.num_free_blocks
            found.append(
                f"at the end {lost} blocks, {sample.num_running} running, {sample.num_waiting} waiting are left"
            )
        if self.num_requests_at_end != 0:
            found.append(f"at the end the gateway counts {self.num_requests_at_end:g} requests")
        return found

    def _bar_faults(self) -> list[str]:
        waits = self.waits()
        bars = {
            "after a drafter's death": DRAFTER_BAR_S,
            "after a head's death": DRAFTER_BAR_S,
            "after a verifier's death": VERIFIER_BAR_S,
        }
        return [
            f"next token {name}: median {waits[name].median:.2f} s, bar {bar:g} s"
            for name, bar in bars.items()
            if waits[name].median >= bar
        ]


def find_tracebacks(log: str) -> tuple[int, str]:
    """Return the number of stack traces in a log, and the beginning of the first one."""
    start = log.find(TRACEBACK)
    return log.count(TRACEBACK), log[start : start + SHOWN_OF_TRACEBACK] if start >= 0 else ""


def to_text(run: Run, faults: Sequence[str]) -> str:
    """Return the report to read."""
    sections = [_struck(run), _requests(run), _times(run), _speculation(run), _end(run), _verdict(run, faults)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def to_json(run: Run, faults: Sequence[str]) -> str:
    """Return all figures, without single arrivals."""
    value: dict[str, Any] = {
        "seconds": run.seconds,
        "seed": run.seed,
        "device": run.device,
        "took_s": run.took_s,
        "num_distinct_requests": run.num_requests,
        "scheduled_deaths": run.num_scheduled,
        "deaths": {process: run.deaths(process) for process in run.num_scheduled},
        "blows": [dataclasses.asdict(blow) for blow in run.blows],
        "requests": {kind: dict(counts) for kind, counts in sorted(run.tally.by_kind.items())},
        "tokens_compared": run.tally.num_tokens_compared,
        "server_errors": run.tally.num_server_errors,
        "waits_s": {name.strip(): dataclasses.asdict(waits) for name, waits in run.waits().items()},
        "drafted_and_accepted_before": run.acceptance_before,
        "drafted_and_accepted": run.acceptance,
        "steps_and_overlapped": run.steps,
        "speculation_came_back": run.num_proofs,
        "verifier_at_end": None if run.last_sample is None else dataclasses.asdict(run.last_sample),
        "holdings_before": {name: dataclasses.asdict(item) for name, item in run.holdings_before.items()},
        "holdings": {name: dataclasses.asdict(item) for name, item in run.holdings.items()},
        "tracebacks": run.tracebacks[0],
        "stop_s": run.stop_s,
        "faults": list(faults),
    }
    return json.dumps(value, indent=1) + "\n"


def _struck(run: Run) -> list[str]:
    counts = collections.Counter((blow.strike.process, _name(blow)) for blow in run.blows)
    lines = [
        f"Seed {run.seed}, on {run.device}, {run.seconds:g} s asked for, {run.took_s:.0f} s taken. What was struck:"
    ]
    lines += [f"  {process:<10} {name:<44} {count:4}" for (process, name), count in sorted(counts.items())]
    deaths = [
        f"{run.deaths(process)} {process} ({scheduled} scheduled)" for process, scheduled in run.num_scheduled.items()
    ]
    return [*lines, f"  deaths: {', '.join(deaths)}"]


def _name(blow: Blow) -> str:
    if blow.strike.action == "pause":
        return "SIGSTOP, SIGCONT"
    if blow.strike.action == "stop":
        return "SIGSTOP, then SIGKILL" if blow.forced else "SIGSTOP, found out and replaced"
    return "SIGKILL" if blow.strike.chained_s is None else "SIGKILL soon after the last death"


def _requests(run: Run) -> list[str]:
    lines = [f"{'Requests':<24}" + "".join(f"{name:>12}" for name in OUTCOMES)]
    for kind, counts in sorted(run.tally.by_kind.items()):
        lines.append(f"  {kind:<22}" + "".join(f"{counts[name]:12}" for name in OUTCOMES))
    lines.append(f"  {'all':<22}" + "".join(f"{run.tally.total(name):12}" for name in OUTCOMES))
    return [*lines, f"  {run.tally.num_tokens_compared} tokens compared, of {run.num_requests} distinct requests"]


def _times(run: Run) -> list[str]:
    return ["Waits of streams (count)", *(f"  {name:<32} {waits}" for name, waits in run.waits().items())]


def _speculation(run: Run) -> list[str]:
    return [
        "Speculation",
        f"  drafts accepted before: {_share(run.acceptance_before)}; between deaths: {_share(run.acceptance)}",
        f"  {run.steps[1]} of {run.steps[0]} steps overlapped",
        f"  accepted drafts seen again after {run.num_proofs} deaths or chains of deaths of verifier or drafter",
    ]


def _share(drafted_and_accepted: tuple[int, int]) -> str:
    drafted, accepted = drafted_and_accepted
    return f"{accepted} of {drafted} ({accepted / drafted:.0%})" if drafted else "nothing drafted"


def _end(run: Run) -> list[str]:
    sample = run.last_sample
    lines = ["At the end"]
    if sample is not None:
        blocks = f"{sample.num_free_blocks} of {sample.num_blocks} blocks free"
        lines.append(f"  verifier: {blocks}, {sample.num_running} running, {sample.num_waiting} waiting")
    lines.append(f"  gateway: {run.num_requests_at_end:g} requests")
    for name, new in run.holdings.items():
        old = run.holdings_before[name]
        memory = f"{old.rss_bytes / 2**20:.0f} -> {new.rss_bytes / 2**20:.0f} MiB"
        descriptors = f"{old.num_descriptors} -> {new.num_descriptors} descriptors"
        lines.append(f"  {name:<10} {memory}, {descriptors}, {old.num_threads} -> {new.num_threads} threads")
    lines.append(f"  {run.tracebacks[0]} stack traces in the log")
    lines.append("  stopped: no" if run.stop_s is None else f"  SIGTERM: gone in {run.stop_s:.1f} s, nothing left")
    return lines


def _verdict(run: Run, faults: Sequence[str]) -> list[str]:
    if not faults:
        return ["Nothing changed, lost, doubled or leaked."]
    more = [f"... and {len(faults) - SHOWN_FAILURES} more"] if len(faults) > SHOWN_FAILURES else []
    return [f"FAILED, {len(faults)} faults:", *(f"- {fault}" for fault in faults[:SHOWN_FAILURES]), *more]
