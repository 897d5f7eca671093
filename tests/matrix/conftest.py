"""Targets with random weights; all folders share the fitted targets."""

from __future__ import annotations

import pytest

from tests.support.deployments import Targets


@pytest.fixture(scope="session")
def random_targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("random"), steps=0)
