"""Records what the commands would start, instead of starting it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import drafter_svc
import gateway
import verifier_svc
from drafter_svc.algorithms import Algorithm
from foretoken.service import Service


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each service's ``run`` calls, by service; nothing is started."""
    seen: dict[str, tuple[Any, ...]] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments: seen.update({name: arguments})

    for name, package in (("gateway", gateway), ("verifier", verifier_svc), ("drafter", drafter_svc)):
        fake = SimpleNamespace(run=record(name), make_drafter=lambda settings: settings)
        monkeypatch.setattr(package, "server", fake, raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.server", fake)
    assembly = SimpleNamespace(
        plan=lambda settings, drafts, has_model: (
            f"a plan {'with' if drafts else 'without'} drafts, {'with' if has_model else 'without'} a model"
        )
    )
    monkeypatch.setattr(verifier_svc, "assembly", assembly, raising=False)
    monkeypatch.setitem(sys.modules, "verifier_svc.assembly", assembly)
    monkeypatch.setattr("foretoken.models.target_check.check_target", lambda path: ())
    return seen


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    """Return the services that ``serve`` hands to its supervisor, by name; nothing is started."""
    seen: dict[str, Service] = {}

    class Recorder:
        def __init__(self, services: Sequence[Service], **callbacks: object) -> None:
            seen.update({service.name: service for service in services})

        async def run(self) -> int:
            return 0

    monkeypatch.setattr("foretoken.supervisor.Supervisor", Recorder)
    # The tests' folders have only the names of a checkpoint's files.
    monkeypatch.setattr(Algorithm, "check_files", lambda algorithm, path, target: ())
    monkeypatch.setattr("foretoken.models.target_check.check_target", lambda path: ())
    return seen
