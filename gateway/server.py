"""Run the gateway process: REST and gRPC in one event loop, from binding ports to draining."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import uvicorn
import uvloop

from foretoken import liveness, rpc
from foretoken.errors import ConfigError, ForetokenError
from foretoken.hosts import bracketed
from foretoken.telemetry import render
from gateway.access import tls_listener
from gateway.access.certificates import Certificates
from gateway.access.grpc_guard import AccessInterceptor
from gateway.access.tls_listener import TlsListener
from gateway.app import create_app
from gateway.assembly import assembled
from gateway.config import GatewaySettings
from gateway.core import GatewayCore
from gateway.discovery.source import VerifierSource
from gateway.grpc import bodies as grpc_bodies
from gateway.grpc.api import API, SERVICE_NAME, GatewayServicer
from gateway.grpc.bodies import BodyInterceptor
from gateway.http_protocol import KEEP_ALIVE_S, HttpProtocol, max_connections
from gateway.sockets import BACKLOG, hold, listen
from gateway.worker_aborts import abort_in_all_workers, aborts_socket, serve_aborts
from gateway.worker_activity import activity_of_all_workers, activity_socket, serve_activity
from gateway.worker_metrics import serve_text, totals_of_all_workers
from protos import gateway_pb2_grpc

logger = logging.getLogger(__name__)

# Time for streams that were cut at the end of the drain to send their last event.
CUT_GRACE_S = 1.0


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Blocks.

    Raises ConfigError for a port in use or an unusable tokenizer.
    """
    uvloop.run(serve(settings))


async def serve(settings: GatewaySettings) -> None:
    """Serve as ``run`` does, in the running event loop."""
    with rpc.stop_signals() as stop, _hangups(settings) as hangup:
        async with Gateway(settings) as gateway, _background(gateway.reload_after(hangup)):
            # Freeze what stays: a full collection would scan it, and
            # hold up every stream meanwhile.
            gc.collect()
            gc.freeze()
            await gateway.until(stop)


class Gateway:
    """A gateway: entering it binds the ports and serves, leaving it drains and stops."""

    def __init__(self, settings: GatewaySettings, source: VerifierSource | None = None) -> None:
        """``source``: where verifiers are, in place of ``settings.verifiers``."""
        self._settings = settings
        self._source = source
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Gateway:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            # Bind the port first: the most common mistake shows before the tokenizer is loaded.
            is_worker = settings.worker_socket is not None
            listener = stack.enter_context(listen(settings.host, settings.port, reuse_port=is_worker))
            if not is_worker:
                # If gRPC found the port in use, its error would take several lines.
                with hold(settings.host, settings.grpc_port, "--grpc-port"):
                    pass
            parts = await stack.enter_async_context(
                assembled(settings, self._source, lambda is_ready: self._health.mark(is_ready))
            )
            self.core, self.verifiers, self._keyring = parts.core, parts.verifiers, parts.keyring
            files = settings.certificate_files
            self._certificates = None if files is None else Certificates(files)
            self._grpc = self._grpc_server(reuse_port=is_worker)
            self._health = rpc.HealthService(self._grpc, (SERVICE_NAME,))
            await self._health.mark(False)
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayServicer(self.core), self._grpc)
            credentials = None if self._certificates is None else self._certificates.grpc
            rpc.bind(self._grpc, f"{bracketed(settings.host)}:{settings.grpc_port}", public_tls=credentials)
            await self._grpc.start()
            stack.push_async_callback(self._grpc.stop, CUT_GRACE_S)
            verifiers_task = await stack.enter_async_context(_background(self.verifiers.run()))
            rest = _RestServer(self.core, settings)
            self.connections = rest.server_state.connections
            accepted = [listener] if self._certificates is None else []
            self._tasks = {verifiers_task, await stack.enter_async_context(_serving(rest, accepted))}
            if self._certificates is not None:
                tls = TlsListener(listener, self._certificates, rest.make_protocol)
                self._tasks.add(await stack.enter_async_context(_background(tls.run())))
            if settings.worker_socket is not None:
                await stack.enter_async_context(self._counting_with_others(settings.worker_socket))
            if settings.liveness_socket is not None:
                stack.enter_context(liveness.answering(settings.liveness_socket))
            stack.push_async_callback(self.drain)
            self._stack = stack.pop_all()
        logger.info("listening", extra={"host": settings.host, "port": settings.port, "grpc_port": settings.grpc_port})
        return self

    def _grpc_server(self, *, reuse_port: bool) -> grpc.aio.Server:
        core = self.core

        def reject(context: Any, error: ForetokenError) -> None:
            core.reject(error, api=API, client_id="", trace=rpc.trace_context(context))

        self.body_interceptor = BodyInterceptor(core.bodies, self._settings.max_concurrent_requests, reject)
        interceptors = (AccessInterceptor(core.policy, reject), self.body_interceptor)
        options = (
            *grpc_bodies.SERVER_OPTIONS,
            ("grpc.server_handshake_timeout_ms", round(1e3 * tls_listener.HANDSHAKE_TIMEOUT_S)),
            # With those that still shake hands.
            ("grpc.max_allowed_incoming_connections", max_connections()),
        )
        return rpc.async_server(reuse_port=reuse_port, options=options, interceptors=interceptors)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def reload(self) -> None:
        """Read keys and certificates again; of a bad file, what it held before stays in use."""
        for kind, held in (("keys", self._keyring), ("certificates", self._certificates)):
            if held is None:
                continue
            try:
                held.reload()
            except (ConfigError, OSError) as error:
                logger.error("not reloaded", extra={"what": kind, "reason": str(error)})
            else:
                logger.warning("reloaded", extra={"what": kind})

    async def reload_after(self, hangup: asyncio.Event) -> None:
        """Reload each time ``hangup`` is set, for ever."""
        while True:
            await hangup.wait()
            hangup.clear()
            self.reload()

    async def until(self, stop: asyncio.Event) -> None:
        """Return when ``stop`` is set. Raises the error of a gateway's task that ends earlier."""
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({stopped, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in done:
            task.result()

    @contextlib.asynccontextmanager
    async def _counting_with_others(self, path: Path) -> AsyncIterator[None]:
        """Serve this worker's counts at ``path``, and show the sum of all workers.

        Abort in all of them.
        """
        metrics = self.core.metrics
        metrics.gather = functools.partial(totals_of_all_workers, path.parent)

        async def own_counts() -> bytes:
            return render(metrics.own_families())

        folder, number = path.parent, int(path.stem.rpartition("-")[2])
        self.core.abort = functools.partial(abort_in_all_workers, folder, self._settings.num_workers)
        self.core.activity = functools.partial(activity_of_all_workers, folder, self._settings.num_workers)
        async with (
            serve_activity(activity_socket(folder, number), self.core.own_activity),
            serve_aborts(aborts_socket(folder, number), self.core.running.abort),
            serve_text(path, own_counts),
        ):
            yield

    async def drain(self) -> None:
        """Drop readiness, refuse new requests with 503, and let running ones finish for a while."""
        self.core.admission.draining = True
        await self._health.drain()
        logger.info("draining", extra={"num_requests": self.core.admission.num_requests})
        if not await self.core.admission.drain(self._settings.drain_timeout_s):
            logger.warning("cutting streams", extra={"num_requests": self.core.admission.num_requests})
            self.verifiers.fail_all("the server is shutting down")
            await self.core.admission.drain(CUT_GRACE_S)


class _RestServer(uvicorn.Server):
    """uvicorn without signal handlers, and with one tick per second instead of ten."""

    def __init__(self, core: GatewayCore, settings: GatewaySettings) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(core),
                host=settings.host,
                port=settings.port,
                # uvicorn accepts any function that makes a protocol.
                http=functools.partial(HttpProtocol, client_timeout_s=settings.client_timeout_s),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._stop = asyncio.Event()

    def make_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection. Call it once the server has started."""
        make = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def stop(self) -> None:
        self.should_exit = True
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()


@contextlib.contextmanager
def _hangups(settings: GatewaySettings) -> Iterator[asyncio.Event]:
    """Yield an event that SIGHUP sets during the block, if it has a meaning for this gateway."""
    hangup = asyncio.Event()
    if not settings.is_reloadable:
        yield hangup
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        yield hangup
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@contextlib.asynccontextmanager
async def _serving(server: _RestServer, listeners: list[socket.socket]) -> AsyncIterator[asyncio.Task[None]]:
    """Run uvicorn on bound sockets; yield when it has started."""
    task = asyncio.create_task(server.serve(sockets=listeners))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0)
        yield task
    finally:
        server.stop()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
