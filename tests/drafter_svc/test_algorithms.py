"""The table of algorithms: its rows name existing code, and only the used code is imported."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from drafter_svc.algorithms import ALGORITHMS, Algorithm, algorithm_names
from tests.support.command_line import loaded_by


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_row_names_what_is_there(row: Algorithm) -> None:
    for name in filter(None, (row.maker, row.checker, row.options)):
        assert callable(resolve_name(name)), name


def test_no_two_rows_share_a_name() -> None:
    assert len(set(algorithm_names())) == len(algorithm_names())


def test_an_ngram_drafter_is_made_without_torch() -> None:
    code = """
from drafter_svc.config import DrafterSettings
from drafter_svc.server import make_drafter
make_drafter(DrafterSettings(address="unix:/d", ngram={"capacity": 1024}))"""
    loaded = loaded_by(code)
    assert "numba" in loaded and not {"torch", "transformers"} & loaded
