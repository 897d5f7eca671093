"""Calibration measures step costs within the context and the cache, however small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch
from verifier_svc.model import calibration
from verifier_svc.model.calibration import REPEATS, measure_step_costs, row_counts


class Recorder:
    """A target that records each batch's positions and KV slots."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.last_position = 0
        self.last_kv_slot = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.rows.append(batch.num_rows)
        self.last_position = max(self.last_position, int(batch.positions.max()))
        self.last_kv_slot = max(self.last_kv_slot, int(batch.kv_slots.max()))
        assert (batch.context_lens == batch.positions + 1).all()
        return torch.zeros(1, 1)

    def commit(self, source_kv_slots: NDArray[np.int32], target_kv_slots: NDArray[np.int32]) -> None:
        raise AssertionError("nothing to commit")


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 100, 129, 2048])
def test_no_position_outside_of_the_context(num_tokens: int) -> None:
    recorder = Recorder()
    costs = measure_step_costs(recorder, num_tokens=num_tokens, block_size=16, most_rows=64)
    assert list(costs) == row_counts(min(64, num_tokens // 2))
    assert recorder.last_position < num_tokens
    assert recorder.last_kv_slot < num_tokens


def test_what_other_processes_add_is_not_taken_for_the_cost_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take a second a row, and the more the earlier they come, but for the last of each size."""
    clock, num_passes = 0.0, 0

    class Slow(Recorder):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            nonlocal clock, num_passes
            num_passes += 1
            clock += batch.num_rows + max(4 * REPEATS - num_passes, 0)
            return super().forward(batch)

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock)
    costs = measure_step_costs(Slow(), num_tokens=64, block_size=16, most_rows=8)
    assert costs == {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}


def test_row_counts_double() -> None:
    assert row_counts(1) == [1]
    assert row_counts(20) == [1, 2, 4, 8, 16]
