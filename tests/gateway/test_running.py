"""Requests are aborted by their id or the client's name, and only their own tenant's."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from gateway.running import RunningRequests


def generation(request_id: str, aborted: list[str]) -> Any:
    """Return what stands for a generation without ids of outputs: it notes that it was aborted."""

    def abort() -> bool:
        aborted.append(request_id)
        return True

    return SimpleNamespace(request=SimpleNamespace(id=request_id), abort=abort, abort_output=lambda name: False)


def test_a_tenant_aborts_its_own_requests_and_nobody_elses() -> None:
    running, aborted = RunningRequests(), list[str]()
    with ExitStack() as stack:
        for request_id, name, tenant in (("1", "mine", "acme"), ("2", "mine", "globex"), ("3", "", "acme")):
            stack.enter_context(running.holding(generation(request_id, aborted), name, tenant))
        assert running.abort("mine", "acme") == 1 and aborted == ["1"]
        assert running.abort("2", "acme") == 0 and running.abort("2", "") == 0
        assert running.abort(None, "acme") == 2 and aborted == ["1", "1", "3"]
    assert running.abort(None, "globex") == 0
