"""An operator's changes to the drafters, which the engine takes in between two steps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from verifier_svc.drafters.source import DraftSource


@dataclass(frozen=True, slots=True)
class AttachDrafter:
    """Add a drafter before the next step. ``done`` ends as Speculator.add_source does."""

    source: DraftSource
    done: Future[None]


@dataclass(frozen=True, slots=True)
class DetachDrafter:
    """Remove a drafter before the next step. ``done`` gets its source, which the caller closes."""

    name: str
    done: Future[DraftSource]
