"""NVIDIA's multi-process service (MPS), with which verifier and drafters share a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foretoken.doctor.finding import Finding, fault, ok, warning
from foretoken.mps import CONTROL, COST, PIPES, MpsMode, answers

_NAME = "MPS"


@dataclass(frozen=True)
class MpsFacts:
    """What there is of MPS.

    Attributes:
        has_control: whether the control program is installed.
        pipes: the folder that the environment names; None: it names none.
        is_accessible: whether this user may enter and write it.
        answers: whether a daemon answers there.
    """

    has_control: bool
    pipes: Path | None = None
    is_accessible: bool = False
    answers: bool = False


def check_mps(mode: MpsMode, facts: MpsFacts) -> Finding:
    """Judge MPS on a machine with a GPU."""
    if mode == "off":
        return ok(_NAME, f"--mps off: {COST}")
    if not facts.has_control:
        found, advice = f"there is no {CONTROL}: {COST}", "install it (it comes with the driver), or --mps off"
        return fault(_NAME, found, advice) if mode == "on" else warning(_NAME, found, advice)
    if facts.pipes is None:
        return ok(_NAME, "foretoken starts a daemon of its own")
    if facts.answers:
        return ok(_NAME, f"the daemon in {facts.pipes} answers")
    problem = "no daemon answers in" if facts.is_accessible else "this user may not write in"
    advice = f"start the daemon as this user, or unset {PIPES}; until then foretoken starts its own"
    return warning(_NAME, f"{problem} {facts.pipes} ({PIPES})", advice)


def read_mps(environment: Mapping[str, str]) -> MpsFacts:
    """Ask for the daemon that ``environment`` names."""
    control = shutil.which(CONTROL, path=environment.get("PATH"))
    named = environment.get(PIPES)
    pipes = Path(named) if named else None
    is_accessible = pipes is not None and os.access(pipes, os.W_OK | os.X_OK)
    does_answer = control is not None and is_accessible and answers(control, environment)
    return MpsFacts(control is not None, pipes, is_accessible, does_answer)
