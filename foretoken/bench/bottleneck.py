"""Say whether the client, and not the server, may be what limits a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.bench.load import LoadResult
from foretoken.bench.measures import percentile, ttft_s

# From this CPU share on, a client process may be what limits the load.
CLIENT_LIMIT = 0.8
# Below this CPU share, a client process is not what makes its event loop late.
BUSY_CLIENT = 0.5
# From this share of the median time to the first token on, a late event loop spoils the times ...
LAG_LIMIT = 0.1
# ... but timers have milliseconds, and a lag of that size says nothing.
LEAST_LAG_S = 0.005


def client_figures(load: LoadResult) -> dict[str, Any]:
    """Return what the clients say about themselves.

    ``lag``: how late their event loops were. ``late``: how much later than due requests were sent.
    """
    late = [answer.sent_at - answer.due_at for answer in load.answers if answer.due_at]
    return {
        "client_busy": load.busiest,
        "client_lag_p99_ms": 1e3 * percentile(load.lags, 0.99),
        "client_lag_max_ms": 1e3 * max(load.lags, default=0.0),
        "client_late_p99_ms": 1e3 * percentile(late, 0.99),
    }


def limits(load: LoadResult) -> list[str]:
    """Return a line for each sign that the clients limited this load; none if they did not."""
    signs: list[str] = []
    if load.busiest > CLIENT_LIMIT:
        signs.append(f"a client process took {load.busiest:.0%} of a core")
    lag = percentile(load.lags, 0.99)
    if lag > _lag_limit(load):
        late = f"a client's event loop was {1e3 * lag:.1f} ms late (p99)"
        if load.busiest < BUSY_CLIENT:
            late += ", though it was hardly busy: other programs, perhaps the server, held this machine's cores"
        signs.append(late)
    return signs


def _lag_limit(load: LoadResult) -> float:
    ttft: Sequence[float] = [ttft_s(answer) for answer in load.answers]
    return max(LEAST_LAG_S, LAG_LIMIT * percentile(ttft, 0.5))
