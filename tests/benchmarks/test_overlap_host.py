"""The benchmark of the host's work follows the loop that it times."""

from __future__ import annotations

import pytest

from benchmarks.overlap_host import PHASES, measure, source_code


@pytest.mark.parametrize(("nodes", "has_lookups"), [(1, False), (4, False), (4, True)])
def test_every_phase_of_overlapped_steps_is_timed(nodes: int, has_lookups: bool) -> None:
    seconds = measure(2, nodes, 3, None, source_code() if has_lookups else None)
    assert set(seconds) == set(PHASES) and seconds["commit"] > 0
