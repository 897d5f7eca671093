"""Run one verifier process: build the engine, serve it, drain it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import uvloop

from foretoken import rpc
from foretoken.drafter import Drafter
from foretoken.links import check_listener, read_credentials
from foretoken.lost_context import exit_if_context_lost
from foretoken.tracing import make_tracer
from protos import verifier_pb2_grpc
from verifier_svc.assembly import Verifier, build
from verifier_svc.config import VerifierSettings
from verifier_svc.drafters.awaited import AwaitedDrafters
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.registry import DrafterRegistry
from verifier_svc.engine import Engine
from verifier_svc.service import VerifierService

SERVICE_NAME = "foretoken.verifier.v1.VerifierService"
# Seconds between checks of the engine thread and, while draining, of the running sequences.
WATCH_S = 0.5
STOP_GRACE_S = 2.0
# Most seconds for which a thread keeps the GIL while another one waits for it. The engine releases
# it in each call that launches GPU work, and waits until it has it back, while the service may
# have messages to write. Python's default of 5 ms is as long as a step.
GIL_INTERVAL_S = 5e-4
# Objects after which Python looks for unreachable cycles among the new ones. A step makes some
# 2000 for 256 sequences and drops nearly all of them at its end. With Python's default of 700, it
# looked through them several times a step.
GC_THRESHOLD = 50_000


def run(settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        ConfigError: a setting cannot be met on this machine or with this model.
        RuntimeError: the engine died.

    A signal during loading ends the process with status 0.
    """
    sys.setswitchinterval(GIL_INTERVAL_S)
    if not uvloop.run(_serve(settings, in_process_drafters)):
        # Loading runs native code that cannot be interrupted. It holds nothing that outlives this
        # process.
        logging.shutdown()
        os._exit(0)


async def _serve(settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None) -> bool:
    """Serve until a signal. Return False if the signal came before the verifier was built.

    Building then still goes on in its thread.
    """
    credentials = read_credentials(settings)
    check_listener(settings.address, credentials, is_insecure=settings.insecure_links)
    tracer = make_tracer(settings.otlp_traces_endpoint, "verifier")
    server = rpc.link_server(settings.address, credentials)
    health = rpc.HealthService(server, (SERVICE_NAME,))
    await health.mark(False)
    with rpc.stop_signals() as stop:
        # Bind before loading the model, so that an address in use fails at once.
        rpc.bind(server, settings.address, credentials)
        verifier: Verifier | None = None
        keeping: asyncio.Task[None] | None = None
        try:
            verifier = await _build(settings, in_process_drafters, stop)
            if verifier is None:
                return False
            engine = verifier.engine
            sources = [drafter.source for drafter in engine.speculator.drafters]
            corpora = DrafterCorpora(sources, settings.drafters, in_process_drafters or {}, credentials)
            keeping = asyncio.create_task(corpora.keep())
            find = engine.speculator.drafter
            drafters = DrafterRegistry(engine.send, find, verifier.clients.make, corpora)
            awaited = AwaitedDrafters(find(client.name) for client in verifier.clients.remote)
            service = VerifierService(engine, verifier.info, tracer, corpora, verifier.grammars, drafters, awaited)
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
            spare_collections()
            engine.start()
            await server.start()
            await health.mark(True)
            await _watch(engine, stop)
            await health.drain()
            service.drain()
            await _idle(engine, settings.drain_timeout_s)
            service.close()
            await server.stop(STOP_GRACE_S)
        finally:
            rpc.remove_socket(settings.address)
            if keeping is not None:
                keeping.cancel()
            if verifier is not None:
                await asyncio.to_thread(verifier.close)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
    return True


def spare_collections() -> None:
    """Make garbage collections rare, and let them skip the objects from start-up, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


async def _build(
    settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None, stop: asyncio.Event
) -> Verifier | None:
    """Run ``build`` in a daemon thread, which delays no exit; None if ``stop`` comes first."""
    built: Future[Verifier] = Future()

    def run() -> None:
        try:
            built.set_result(build(settings, in_process_drafters))
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=run, name="verifier-build", daemon=True).start()
    building = asyncio.wrap_future(built)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return building.result() if building.done() else None


async def _watch(engine: Engine, stop: asyncio.Event) -> None:
    """Wait for ``stop``. Raises RuntimeError if the engine dies, since its state is lost.

    Ends the process at once if the engine has lost its GPU context.
    """
    while not stop.is_set():
        if not engine.is_alive():
            exit_if_context_lost()
            raise RuntimeError("the engine died") from engine.failure
        try:
            await asyncio.wait_for(stop.wait(), WATCH_S)
        except TimeoutError:
            continue


async def _idle(engine: Engine, timeout_s: float) -> None:
    """Wait up to ``timeout_s`` seconds until the engine is idle. Gateways resume the rest."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not engine.is_idle and loop.time() < deadline:
        await asyncio.sleep(min(WATCH_S, 0.05))
