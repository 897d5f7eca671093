"""Services within this process, and what a verifier says of itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from drafter_svc.service import DrafterService
from drafter_svc.thread import DrafterThread
from foretoken import rpc
from foretoken.drafter import Drafter
from foretoken.limits import ModelLimits
from protos import drafter_pb2_grpc
from verifier_svc.info import VerifierConstants


@contextlib.asynccontextmanager
async def serving(drafter: Drafter, address: str) -> AsyncIterator[None]:
    """Serve a drafter as a drafter process would."""
    thread = DrafterThread(lambda: drafter)
    server = rpc.async_server()
    rpc.bind(server, address)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(DrafterService("any", thread), server)
    await server.start()
    await asyncio.wrap_future(thread.ready)
    try:
        yield
    finally:
        await asyncio.to_thread(thread.stop)
        await server.stop(None)


def verifier_info(limits: ModelLimits, eos_ids: tuple[int, ...] = ()) -> VerifierConstants:
    """Return what a verifier of the hash target says of itself."""
    return VerifierConstants(5, "hash", "f" * 64, "CPU", "float32", "strict", limits, eos_ids, 16, 0)
