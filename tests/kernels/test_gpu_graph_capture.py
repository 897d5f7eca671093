from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from foretoken_kernels.gpu.graph_capture import captured


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def capture_begin(self, **options: Any) -> None:
        self.calls.append(("begin", options))

    def capture_end(self) -> None:
        self.calls.append(("end", {}))


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_during_a_capture(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    if not was_enabled:
        gc.disable()
    seen: list[bool] = []
    graph: Any = captured(lambda: seen.append(gc.isenabled()), "pool")
    assert seen == [False] and gc.isenabled() is was_enabled
    assert graph.calls == [("begin", {"pool": "pool", "capture_error_mode": "thread_local"}), ("end", {})]

    def fails() -> None:
        raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        captured(fails)
    assert gc.isenabled() is was_enabled


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_end_a_capture(device: str) -> None:
    """The collector frees objects that refer to each other, and may run at any allocation."""
    ones, total = torch.ones(8, device=device), torch.zeros(8, device=device)

    def add() -> None:
        total.add_(ones)

    def add_among_objects() -> None:
        gc.set_threshold(1)
        _ = [[object()] for _ in range(2000)]
        add()

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        add()
        gc.disable()
        for _ in range(3):
            circle: list[Any] = [captured(add)]
            circle.append(circle)
            del circle
        gc.enable()
        graph = captured(add_among_objects)
        total.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert total.tolist() == [1.0] * 8
