"""Fixtures of tests that draft from device memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.overlap_play import Play
from tests.support.overlapped_drafters import make, on


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[[str], Play]:
    """Return a function that gives the play of a kind; each drafter is attached once."""

    @cache
    def attached(kind: str) -> Play:
        drafter, target, width = make(kind, tmp_path_factory.mktemp("drafter"), on(device))
        drafter.attach(target, None)
        return Play(drafter, device, vocab=target.vocab_size, width=width)

    return attached
