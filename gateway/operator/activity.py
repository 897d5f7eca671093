"""Serve what the server does now and did in the last minutes, to the operator."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from gateway import http
from gateway.core import GatewayCore
from gateway.messages import VerifierInfo
from gateway.recent_requests import MOST_KEPT
from gateway.verifier_client import VerifierClient

_LOAD = ("num_running", "num_waiting", "max_queue", "num_blocks", "num_free_blocks")
_DRAFTER = (
    "name",
    "algorithm",
    "transport",
    "address",
    "state",
    "reason",
    "num_attaches",
    "num_draft_tokens",
    "num_accepted_tokens",
)


def activity_router(core: GatewayCore) -> APIRouter:
    """Return the route of one gateway, for the operator."""
    router = APIRouter(prefix="/v1/activity", tags=["Operation"])

    @router.get("")
    async def activity() -> Response:
        """Return the load, all drafters, and the last minutes' requests.

        The load is the gateway's and its verifiers'.

        Requests that ran have figures and no text: at most 200 of the last 15 minutes.
        """
        processes = await core.activity()
        infos = await core.verifiers.fetch_infos()
        requests = [request for process in processes for request in process["requests"]]
        requests.sort(key=lambda request: -request["ended_at"])
        return http.json_response(
            {
                "num_requests": sum(process["num_requests"] for process in processes),
                "num_waiting": sum(process["num_waiting"] for process in processes),
                "verifiers": [_verifier(client, infos.get(client.address)) for client in core.verifiers.clients],
                "requests": requests[:MOST_KEPT],
            }
        )

    return router


def _verifier(client: VerifierClient, info: VerifierInfo | None) -> dict[str, Any]:
    if info is None:
        return {"address": client.address, "up": False, "drafters": []}
    drafters = [{name: getattr(drafter, name) for name in _DRAFTER} for drafter in info.drafters]
    return {
        "address": client.address,
        "up": client.is_up,
        **{name: getattr(info, name) for name in _LOAD},
        "drafters": drafters,
    }
