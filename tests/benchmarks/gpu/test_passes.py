"""The times of a draft's graphs are taken without
changing what it drafts; shares of a bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import passes
from benchmarks.gpu.checkpoint import SHAPES, random_eagle3, random_target
from benchmarks.gpu.floor import StepBytes
from benchmarks.gpu.passes import DraftPartTimes, Floor, draft_request, draft_times
from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ModelPlacement
from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.models.backend import Backend

SHAPE = (3, 2, 6, 2)


def test_shares() -> None:
    floor = Floor(StepBytes(target=3_000, head_once=100, head_level=400, cache_per_token=1), bandwidth=1e6)
    assert floor.share(3_000, 4.0) == pytest.approx(0.75)
    # Five levels: the roots come from the entries' pass.
    assert DraftPartTimes(entries=1.0, trees=2.0).level(5) == 0.5


@pytest.mark.slow
def test_graphs_are_timed_and_leave_what_they_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(passes, "CONTEXT", 20)
    random_target(tmp_path / "target", SHAPES["tiny"])
    random_eagle3(tmp_path / "eagle3", tmp_path / "target", draft_vocab_size=500)
    shape = SHAPES["tiny"]
    placement = ModelPlacement(Backend("gpu", torch.device(device)), torch.float32, warm=False)
    num_launches = 0

    def measure(launch: Callable[[], object]) -> float:
        nonlocal num_launches
        num_launches += 1
        for _ in range(2):
            launch()
        return 10.0**num_launches

    def keep(drafter: HeadDrafter, found: list[DraftBatch], request: DraftRequest) -> None:
        found.append(drafter.draft(request))

    drafts: list[list[DraftBatch]] = []
    for is_timed in (False, True):
        drafter = HeadDrafter("EAGLE3", tmp_path / "eagle3", placement=placement)
        drafter.attach(passes._info(tmp_path / "target", shape.num_layers, shape.hidden_size), None)
        found: list[DraftBatch] = []
        for step in range(3):
            request = draft_request(2, SHAPE, 3 * shape.hidden_size, 1, step)
            if is_timed:
                times = draft_times(partial(keep, drafter, found, request), measure)
                # The pass over the new tokens comes first.
                assert times == (10.0 ** (num_launches - 1), 10.0**num_launches)
            else:
                keep(drafter, found, request)
        drafts.append(found)
    assert num_launches == 6
    for plain, timed in zip(*drafts, strict=True):
        for name in ("node_starts", "tokens", "parents"):
            assert np.array_equal(getattr(plain, name), getattr(timed, name)), name
        np.testing.assert_allclose(timed.scores, plain.scores, rtol=1e-4)
        assert timed.node_starts.tolist() == [0, 6, 12]
