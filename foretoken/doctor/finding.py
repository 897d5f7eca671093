"""What one check found, and how findings are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from foretoken.errors import ForetokenError

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        check: what was checked, in a word or two.
        level: ``fault``: foretoken cannot run so; ``warning``: it runs, but not as it could.
        found: what there is.
        advice: what to do about it; empty if there is nothing to do.
    """

    check: str
    level: Level
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "warning", found, advice)


def fault(check: str, found: str, advice: str = "") -> Finding:
    """Return a fault. ``advice`` may be empty where an error's message already says what to do."""
    return Finding(check, "fault", found, advice)


def failed(check: str, error: ForetokenError, advice: str = "") -> Finding:
    """Return a fault with an error's message on one line. Its own advice wins over ``advice``."""
    return fault(check, " ".join(error.message.split()), error.advice or advice)


def tried(check: str, attempt: Callable[[], object], found: str, advice: str = "") -> Finding:
    """Return ``found`` if ``attempt`` raises no ForetokenError, else a fault with its message."""
    try:
        attempt()
    except ForetokenError as error:
        return failed(check, error, advice)
    return ok(check, found)


def count(findings: Iterable[Finding], level: Level) -> int:
    return sum(finding.level == level for finding in findings)


def lines(findings: list[Finding]) -> list[str]:
    """Return a line for each finding, in columns, and one that counts."""
    width = max(len(finding.check) for finding in findings)
    return [
        *(f"{f.level:<8} {f.check:<{width}}  {f.found}" + (f"; {f.advice}" if f.advice else "") for f in findings),
        _summary(findings),
    ]


def _summary(findings: list[Finding]) -> str:
    numbers = ((count(findings, "fault"), "fault"), (count(findings, "warning"), "warning"))
    said = [f"{number} {word}{'' if number == 1 else 's'}" for number, word in numbers if number]
    return " and ".join(said) if said else "no fault found"


def as_json(findings: list[Finding]) -> dict[str, Any]:
    numbers = {f"num_{level}s": count(findings, level) for level in ("fault", "warning")}
    return {**numbers, "findings": [asdict(finding) for finding in findings]}
