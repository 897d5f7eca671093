"""The vocabulary of tests/support/grammars.py."""

from __future__ import annotations

import pytest

from tests.support.grammars import vocabulary
from verifier_svc.sampling.grammar import Vocabulary


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))
