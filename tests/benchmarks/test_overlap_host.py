"""The benchmark of the host's work follows the loop that it times."""

from __future__ import annotations

import pytest

from benchmarks.overlap_host import PHASES, measure, source_code


@pytest.mark.parametrize(
    ("nodes", "has_lookups", "waits"),
    [(1, False, True), (4, False, True), (1, True, True), (4, True, True), (1, True, False)],
)
def test_every_phase_of_overlapped_steps_is_timed(nodes: int, has_lookups: bool, waits: bool) -> None:
    seconds = measure(2, nodes, 3, None, source_code() if has_lookups else None, waits=waits)
    assert set(seconds) == set(PHASES) and seconds["commit"] > 0
