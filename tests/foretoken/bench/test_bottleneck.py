"""Whether the client limited a load: by its CPU share, and by how late its event loop was."""

from __future__ import annotations

import pytest

from foretoken.bench.bottleneck import client_figures, limits
from foretoken.bench.load import CompletedRequest, LoadResult

OTHERS = ", though it was hardly busy: other programs, perhaps the server, held this machine's cores"


def load(busiest: float, lags: list[float], ttft_s: float = 0.1, late_s: float = 0.0) -> LoadResult:
    answers = [CompletedRequest(1.0 + late_s, 1.0 + late_s + ttft_s, 9.0, 1, 0, 10, (), due_at=1.0)]
    return LoadResult(answers, busiest, lags=lags)


@pytest.mark.parametrize(
    ("found", "signs"),
    [
        (load(0.8, [0.001] * 100), []),
        (load(0.81, [0.001] * 100), ["a client process took 81% of a core"]),
        # 10% of 100 ms to the first token; one late beat in a hundred is not p99.
        (load(0.1, [0.010] * 100), []),
        (load(0.1, [0.001] * 99 + [0.5]), []),
        (load(0.6, [0.001] * 98 + [0.011] * 2), ["a client's event loop was 11.0 ms late (p99)"]),
        (load(0.1, [0.001] * 98 + [0.011] * 2), ["a client's event loop was 11.0 ms late (p99)" + OTHERS]),
        # Timers have milliseconds: below 5 ms there is no verdict, however fast the server is.
        (load(0.1, [0.004] * 100, ttft_s=0.001), []),
        (load(0.5, [0.006] * 100, ttft_s=0.001), ["a client's event loop was 6.0 ms late (p99)"]),
        (load(0.1, [0.011] * 100, ttft_s=1.0), []),
        (LoadResult([], 0.9), ["a client process took 90% of a core"]),
    ],
)
def test_signs_of_a_client_that_limits(found: LoadResult, signs: list[str]) -> None:
    assert limits(found) == signs


def test_what_clients_say_about_themselves() -> None:
    assert client_figures(load(0.25, [0.001, 0.003], late_s=0.5)) == pytest.approx(
        {"client_busy": 0.25, "client_lag_p99_ms": 3, "client_lag_max_ms": 3, "client_late_p99_ms": 500}
    )
    assert client_figures(LoadResult([], 0.0))["client_lag_max_ms"] == 0.0
