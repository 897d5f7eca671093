"""Keep the requests that run in this process, so that a client can abort them by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gateway.generation import Generation


class RunningRequests:
    """Finds generations by their id, or by the client's name for them."""

    def __init__(self) -> None:
        # By the id of each request: its generation, the client's name, which may not be unique, and
        # the tenant.
        self._running: dict[str, tuple[Generation, str, str]] = {}

    @contextlib.contextmanager
    def holding(self, generation: Generation, client_id: str, tenant: str) -> Iterator[None]:
        """Know a generation within the block."""
        self._running[generation.request.id] = generation, client_id, tenant
        try:
            yield
        finally:
            del self._running[generation.request.id]

    def abort(self, name: str | None, tenant: str) -> int:
        """Abort a tenant's requests with this id or client's name, or all for None.

        The id may be that of one output. Return how many.
        """
        count = 0
        for request_id, (generation, client_id, owner) in self._running.items():
            if owner != tenant:
                continue
            if name is None or name in (request_id, client_id):
                count += generation.abort()
            else:
                count += generation.abort_output(name)
        return count
