"""Targets with their drafters, made once a session."""

from __future__ import annotations

import pytest

from tests.support.deployments import Targets


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """Fitted."""
    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="session")
def random_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """Of random weights."""
    return Targets(tmp_path_factory.mktemp("random"), steps=0)
