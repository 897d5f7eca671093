"""Metrics are summed over worker processes; some die, stop or come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foretoken.errors import UnavailableError
from foretoken.telemetry import parse
from gateway import worker_metrics
from gateway.worker_metrics import (
    TOTALS_SOCKET,
    WorkerProbe,
    WorkerTotals,
    serve_text,
    totals_of_all_workers,
    worker_socket,
)

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def worker(path: Path, process: str, num_tokens: int, num_inside: int) -> AsyncIterator[None]:
    """Run a worker process that has these counts."""
    text = (
        f"# TYPE foretoken_tokens_total counter\nforetoken_tokens_total {num_tokens}\n"
        f"# TYPE foretoken_inside gauge\nforetoken_inside {num_inside}\n"
    )

    async def counts() -> bytes:
        return text.encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_metrics, "_PROCESS", process)
        async with serve_text(path, counts):
            yield


async def sums(totals: WorkerTotals) -> dict[str, float]:
    families = parse((await totals.text()).decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_a_sum_never_goes_backwards(tmp_path: Path) -> None:
    first, second = worker_socket(tmp_path, 0), worker_socket(tmp_path, 1)
    totals = WorkerTotals([first, second])
    assert await sums(totals) == {}
    # One at a time, as this process's name is patched. The other one counts as it last answered.
    async with worker(first, "a", 5, 2):
        assert await sums(totals) == {"foretoken_tokens_total": 5, "foretoken_inside": 2}
    async with worker(second, "b", 7, 1):
        assert await sums(totals) == {"foretoken_tokens_total": 12, "foretoken_inside": 1}
    assert await sums(totals) == {"foretoken_tokens_total": 12}
    # The first one comes back as it was, then as another process that counts from zero.
    async with worker(first, "a", 6, 0):
        assert await sums(totals) == {"foretoken_tokens_total": 13, "foretoken_inside": 0}
    async with worker(first, "c", 1, 0):
        assert await sums(totals) == {"foretoken_tokens_total": 14, "foretoken_inside": 0}
    async with worker(first, "d", 0, 0):
        assert await sums(totals) == {"foretoken_tokens_total": 14, "foretoken_inside": 0}


async def test_a_socket_that_a_killed_worker_left_is_taken_over(tmp_path: Path) -> None:
    path = worker_socket(tmp_path, 0)
    path.touch()
    probe = WorkerProbe(path, tmp_path / "alive")
    assert not await probe.is_ready()
    async with worker(path, "a", 1, 0):
        assert await probe.is_ready()
    assert not path.exists()


async def test_a_worker_without_its_parent_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="are not available"):
        await totals_of_all_workers(tmp_path)
    async with worker(tmp_path / TOTALS_SOCKET, "parent", 3, 0):
        families = await totals_of_all_workers(tmp_path)
        assert [sample.value for family in families for sample in family.samples] == [3, 0]
