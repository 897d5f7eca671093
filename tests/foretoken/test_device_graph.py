from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch

from foretoken.models.device_graph import DeviceGraphs


@pytest.mark.gpu
def test_all_captures_of_one_owner_share_a_workspace(device: str) -> None:
    """More matmul shapes take no more memory: cuBLAS keeps one workspace for each new stream."""
    weights = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    rows = torch.randn(64, 4096, device=device, dtype=torch.bfloat16)
    results = torch.zeros(64, 4096, device=device, dtype=torch.bfloat16)
    graphs = DeviceGraphs(enabled=True)

    def run(num_rows: int) -> None:
        graphs.run(num_rows, lambda: torch.mm(rows[:num_rows], weights, out=results[:num_rows]))

    run(1)
    reserved = torch.cuda.memory_reserved()
    for num_rows in range(2, 41):
        run(num_rows)
    assert torch.cuda.memory_reserved() == reserved
    expected = rows[:40] @ weights
    results.zero_()
    assert not graphs.captures(40)
    run(40)
    torch.testing.assert_close(results[:40], expected)
    assert not results[40:].any()


@pytest.mark.gpu
def test_graphs_can_be_captured_anew_after_all_were_forgotten(device: str) -> None:
    """The workspace lies in the memory of the first graphs, and outlives them."""
    weights = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    rows = torch.randn(16, 1024, device=device, dtype=torch.bfloat16)
    results = torch.zeros_like(rows)
    graphs = DeviceGraphs(enabled=True)
    expected = rows @ weights
    for generation in range(3):
        assert graphs.generation == generation and graphs.captures("matmul")
        graphs.run("matmul", lambda: torch.mm(rows, weights, out=results))
        results.zero_()
        torch.empty(256 << 20, dtype=torch.uint8, device=device).fill_(255)
        graphs.run("matmul", lambda: pytest.fail("is captured already"))
        torch.testing.assert_close(results, expected)
        graphs.clear()


class Captured(DeviceGraphs):
    """Notes what is captured, where there is no GPU."""

    def __init__(self, eager_uses: int) -> None:
        super().__init__(enabled=True, eager_uses=eager_uses)
        self.keys: list[Hashable] = []

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> Graph:  # type: ignore[override]
        self.keys.append(key)
        return Graph(launch)


class Graph:
    def __init__(self, launch: Callable[[], None]) -> None:
        self.replay = launch


def test_a_key_is_captured_after_its_eager_uses_and_each_use_launches_once() -> None:
    graphs = Captured(eager_uses=2)
    launched: list[str] = []
    for use in range(5):
        assert graphs.captures("often") == (use == 2)
        graphs.run("often", lambda: launched.append("often"))
        assert graphs.keys == (["often"] if use >= 2 else [])
    assert len(launched) == 5
    graphs.run("seldom", lambda: launched.append("seldom"))
    assert graphs.keys == ["often"] and graphs.lacks("seldom") and not graphs.lacks("often")


def test_an_early_capture_waits_for_no_uses() -> None:
    graphs = Captured(eager_uses=2)
    graphs.capture("usual", lambda: None)
    assert not graphs.captures("usual") and graphs.keys == ["usual"]
    graphs.clear()
    assert graphs.lacks("usual") and not graphs.captures("usual")
