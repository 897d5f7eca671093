"""Fitted targets with their drafters, made once a session."""

from __future__ import annotations

import pytest

from tests.support.deployments import Targets


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))
