"""Serve the operator's API for drafters: attach, list and detach them while verifiers serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway import http
from gateway.core import GatewayCore
from gateway.fields import ClosedFields, validate
from gateway.messages import DrafterInfo
from gateway.operator.all_verifiers import call_all
from gateway.verifier_client import VerifierClient
from gateway.verifier_wire import drafter_from_proto
from protos import verifier_pb2

# Enough for one engine step, and for the end of the drafter's thread.
CALL_TIMEOUT_S = 30.0


class DrafterFields(ClosedFields):
    """Body of POST /v1/drafters."""

    name: str = Field(description="1 to 64 characters of a-z, 0-9, _, . and -; not auto nor merge.")
    address: str = Field(description="unix:/path or host:port of a drafter that serves no other verifier.")
    transport: Literal["auto", "shared-memory", "grpc"] = Field("auto", description="auto: by the kind of address.")
    verifier: str = Field("", description="Address of one verifier; empty: all.")


def drafters_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway, for the operator."""
    router = APIRouter(prefix="/v1/drafters", tags=["Operation"])

    @router.post("", openapi_extra=http.body_schema(DrafterFields))
    async def attach(request: Request) -> Response:
        """Attach a drafter until it is detached or the verifier ends; requests may name it."""
        fields = validate(DrafterFields, await http.read_object(request))
        limits.check_drafter_name("name", fields.name)
        limits.check_address("address", fields.address)
        clients = _verifiers(core, fields.verifier)
        message = verifier_pb2.AttachDrafterRequest(
            name=fields.name, address=fields.address, transport=fields.transport
        )
        answers = await _change(core, clients, "AttachDrafter", message)
        drafters = [drafter_from_proto(answer.drafter) for answer in answers]
        return _list(zip(clients, drafters, strict=True))

    @router.get("")
    async def list_all(verifier: str = "") -> Response:
        """List all drafters as each verifier sees them, detached ones included."""
        clients = _verifiers(core, verifier)
        infos = [(client, await client.fetch_info()) for client in clients]
        return _list((client, drafter) for client, info in infos for drafter in info.drafters)

    @router.delete("/{name}")
    async def detach(name: str, verifier: str = "") -> Response:
        """Detach a drafter: its requests continue, and new ones may still name it."""
        await _change(core, _verifiers(core, verifier), "DetachDrafter", verifier_pb2.DetachDrafterRequest(name=name))
        return http.json_response({"object": "drafter", "name": name, "detached": True})

    return router


def _verifiers(core: GatewayCore, address: str) -> Sequence[VerifierClient]:
    clients = [client for client in core.verifiers.clients if address in ("", client.address)]
    if not clients:
        addresses = ", ".join(client.address for client in core.verifiers.clients)
        raise InvalidRequestError(f"there is no such verifier; available: {addresses}", field="verifier")
    return clients


async def _change(core: GatewayCore, clients: Sequence[VerifierClient], method: str, message: Any) -> list[Any]:
    try:
        return await call_all(clients, method, message, timeout_s=CALL_TIMEOUT_S)
    finally:
        # Other gateway processes learn new names when a request uses one.
        await core.verifiers.fetch_infos()


def _list(drafters: Iterable[tuple[VerifierClient, DrafterInfo]]) -> Response:
    names = ("name", "algorithm", "transport", "address", "state", "reason", "num_attaches")
    data = [
        {"object": "drafter", "verifier": client.address, **{name: getattr(drafter, name) for name in names}}
        for client, drafter in drafters
    ]
    return http.json_response({"object": "list", "data": data})
