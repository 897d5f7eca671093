"""A drafter process: makes the drafter, serves it and stops cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from pkgutil import resolve_name

import uvloop

from drafter_svc.algorithms import ALGORITHMS
from drafter_svc.config import DrafterSettings
from drafter_svc.service import SERVICE_NAME, DrafterService
from drafter_svc.thread import DrafterThread
from foretoken import rpc
from foretoken.drafter import Drafter
from foretoken.links import check_listener, read_credentials
from foretoken.tracing import make_tracer
from protos import drafter_pb2_grpc

logger = logging.getLogger(__name__)

# Seconds that running calls may take at a stop; streams have ended by then.
STOP_GRACE_S = 1.0


def make_drafter(settings: DrafterSettings) -> Drafter:
    """Make the drafter that the settings name, with its kernels compiled.

    Raises ConfigError or CheckpointError if its files do not hold its model.
    """
    drafter: Drafter = resolve_name(ALGORITHMS[settings.algorithm].maker)(settings)
    return drafter


def run(settings: DrafterSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if the address cannot be used."""
    uvloop.run(serve(settings, lambda: make_drafter(settings)))


async def serve(settings: DrafterSettings, make: Callable[[], Drafter], spin_us: int | None = None) -> None:
    """Make a drafter and serve it, in a thread of its own, until SIGTERM or SIGINT.

    ``spin_us``: microseconds to watch for the next request before the thread blocks; None:
    ``default_spin_us``.
    """
    credentials = read_credentials(settings)
    check_listener(settings.address, credentials, is_insecure=settings.insecure_links)
    tracer = make_tracer(settings.otlp_traces_endpoint, "drafter")
    with rpc.stop_signals() as stop:
        server = rpc.link_server(settings.address, credentials)
        health = rpc.HealthService(server, (SERVICE_NAME,))
        await health.mark(False)
        rpc.bind(server, settings.address, credentials)
        thread = DrafterThread(make, spin_us, counts_rounds=tracer is not None)
        try:
            service = DrafterService(settings.name, thread, tracer)
            drafter_pb2_grpc.add_DrafterServiceServicer_to_server(service, server)
            await server.start()
            logger.info("drafter %s (%s) is warming up", settings.name, settings.algorithm)
            stopped = asyncio.ensure_future(stop.wait())
            warm = asyncio.wrap_future(thread.ready)
            await asyncio.wait((stopped, warm), return_when=asyncio.FIRST_COMPLETED)
            if warm.done():
                warm.result()
                # The objects of the start stay: later collections, in the middle of a draft, skip
                # them.
                gc.collect()
                gc.freeze()
                await health.mark(True)
                logger.info("drafter %s serves on %s", settings.name, settings.address)
            await stopped
            logger.info("drafter %s stops", settings.name)
            await health.drain()
        finally:
            # The thread first: it ends the attachment, and with it the stream.
            await asyncio.to_thread(thread.stop)
            await server.stop(STOP_GRACE_S)
            rpc.remove_socket(settings.address)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
