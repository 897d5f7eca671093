"""Share among gRPC services: options, addresses, errors as statuses, health and reflection.

This module knows none of foretoken's services and messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from foretoken import links, tracing
from foretoken.address import UNIX_PREFIX
from foretoken.errors import ConfigError, ForetokenError, InvalidRequestError, error_from_code
from foretoken.limits import MAX_BODY_BYTES
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from foretoken.tracing import TraceContext

logger = logging.getLogger(__name__)

# Trailing metadata that names the request field at fault.
FIELD_METADATA_KEY = "foretoken-field"
# Answers may be larger than requests: the logprobs of a long prompt are one message.
MAX_RESPONSE_BYTES = 8 * MAX_BODY_BYTES
# A peer that vanished without closing its socket (power, network) is detected after time + timeout.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# sun_path holds 108 bytes, including the closing zero.
MAX_UNIX_PATH_BYTES = 107

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel connects at once, without the backoff of an older channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Services connect directly, whatever web proxy the machine uses.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    # A second server must not share a port that is in use.
    ("grpc.so_reuseport", 0),
)


def unix_path(address: str) -> Path | None:
    """Return the socket file of ``unix:/path``; None for host:port."""
    return Path(address.removeprefix(UNIX_PREFIX)) if address.startswith(UNIX_PREFIX) else None


def async_channel(address: str, credentials: LinkCredentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """Return a channel for asyncio code. It connects on first use and reconnects by itself."""
    tls = links.channel_credentials(address, credentials)
    channel = (
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        if tls is None
        else grpc.aio.secure_channel(address, tls, options=CHANNEL_OPTIONS)
    )
    links.show_token(channel, address, credentials)
    return channel


def sync_channel(address: str, credentials: LinkCredentials = NO_CREDENTIALS) -> grpc.Channel:
    """Return a channel for threads. It connects on first use and reconnects by itself."""
    tls = links.channel_credentials(address, credentials)
    channel = (
        grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        if tls is None
        else grpc.secure_channel(address, tls, options=CHANNEL_OPTIONS)
    )
    links.show_token(channel, address, credentials)
    return channel


def async_server(
    *,
    reuse_port: bool = False,
    options: Sequence[tuple[str, int]] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a server whose handlers may raise ForetokenErrors, which become statuses.

    ``reuse_port``: share the port with other such processes of the same user. ``interceptors`` run
    before the one for errors.
    """
    all_options = dict(SERVER_OPTIONS) | dict(options) | {"grpc.so_reuseport": int(reuse_port)}
    return grpc.aio.server(options=tuple(all_options.items()), interceptors=(*interceptors, ErrorInterceptor()))


def link_server(address: str, credentials: LinkCredentials) -> grpc.aio.Server:
    """Return a server for peers at ``address``, as ``async_server``; it refuses strangers' calls.

    Bind it with the same arguments.
    """
    return async_server(interceptors=links.server_interceptors(address, credentials))


def bind(
    server: grpc.aio.Server,
    address: str,
    credentials: LinkCredentials = NO_CREDENTIALS,
    *,
    public_tls: grpc.ServerCredentials | None = None,
) -> int:
    """Bind ``unix:/path`` or host:port; return the port (0 for a socket file, of mode 0600).

    ``credentials``: of a link between services; ``public_tls``: of a server for clients.

    Replaces a socket file that nobody listens on. Raises ConfigError if the address is in use or
    unusable.
    """
    path = unix_path(address)
    if path is not None:
        if not path.parent.is_dir():
            raise ConfigError(f"cannot listen on {address}: there is no folder {path.parent}")
        remove_stale_socket(path)
    try:
        tls = public_tls or links.server_credentials(address, credentials)
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: it is in use or not this machine's") from error
    if path is None:
        return int(port)
    os.chmod(path, 0o600)
    return 0


def remove_stale_socket(path: Path) -> None:
    """Remove a socket file that nobody listens on.

    Raises ConfigError if it is in use or no socket.
    """
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise ConfigError(f"socket path is longer than {MAX_UNIX_PATH_BYTES} bytes: {path}")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # The backlog is full: somebody listens.
    raise ConfigError(f"{path} is in use by another process")


def remove_socket(address: str) -> None:
    """Remove the socket file of ``unix:/path`` if it exists."""
    path = unix_path(address)
    if path is not None:
        path.unlink(missing_ok=True)


class HealthService:
    """Serves grpc.health.v1 and reflection for one server.

    The empty name stands for the process: it is SERVING while the server answers, even while it
    loads or drains. A service's name stands for its readiness: SERVING only after ``mark(True)``.
    """

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        """``service_names``: full names, as in ``foretoken.drafter.v1.DrafterService``."""
        self._names = tuple(service_names)
        self._draining = False
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    async def mark(self, serving: bool) -> None:
        """Set the status of each service. Call ``mark(False)`` before the server starts."""
        serving = serving and not self._draining
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

    async def drain(self) -> None:
        """Make no service SERVING from now on; later marks have no effect."""
        self._draining = True
        await self.mark(False)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a ForetokenError into its status, with the field in trailing metadata.

    Any other exception is logged and becomes INTERNAL.
    """

    # Any: synchronous and asyncio handlers share grpc's handler type.
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        # Health and reflection handle errors themselves and are other kinds of coroutines.
        if handler is None or not handler_call_details.method.startswith("/foretoken."):
            return handler
        codec = (_decode_or_error(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), *codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream), *codec)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary), *codec)
        return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream), *codec)


def decode(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    """Decode a message. Raises InvalidRequestError if ``data`` is not one."""
    return _checked(_decode_or_error(deserializer)(data))


def _decode_or_error(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that returns an error instead of raising, which grpc would log."""

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return InvalidRequestError("the message cannot be decoded")

    return read


def _checked(request: Any) -> Any:
    """Return a request or a stream of requests. Raises an error that the deserializer returned."""
    if isinstance(request, InvalidRequestError):
        raise request
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _unary(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except Exception as error:
            await abort(context, error)

    return call


def _stream(behaviour: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Any:
    if not inspect.isasyncgenfunction(behaviour):
        raise TypeError(f"{behaviour!r}: a streaming handler is an async generator")

    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            # aclosing: if the client goes away, the handler's finally clauses run now, not at
            # collection.
            async with contextlib.aclosing(behaviour(_checked(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await abort(context, error)

    return call


async def abort(context: Any, error: Exception) -> None:
    """End the call with the status of ``error``. Always raises."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ForetokenError):
        metadata = ((FIELD_METADATA_KEY, error.field),) if error.field else ()
        await context.abort(error.status, error.message, metadata)
    logger.error("unexpected error in a gRPC handler", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error")


def trace_context(context: Any) -> TraceContext | None:
    """Return the W3C trace context in a call's metadata, if it is well formed."""
    metadata = dict(context.invocation_metadata() or ())
    traceparent, tracestate = metadata.get("traceparent"), metadata.get("tracestate")
    return tracing.trace_context(
        traceparent if isinstance(traceparent, str) else None, tracestate if isinstance(tracestate, str) else None
    )


def error_from_rpc(error: grpc.RpcError) -> ForetokenError:
    """Return the ForetokenError, with its field, for a failed call."""
    status: grpc.StatusCode = error.code()
    # Any: asyncio and synchronous calls carry pairs of different types.
    pairs: Any = error.trailing_metadata() or ()
    metadata = {key: value for key, value in pairs}
    details = error.details() or status.name
    # gRPC repeats the address and adds its own status: only the text after the last ": " says why.
    if details.startswith("failed to connect to all addresses"):
        details = f"it cannot be reached ({details.rsplit(': ', 1)[-1]})"
    return error_from_code(int(status.value[0]), details, metadata.get(FIELD_METADATA_KEY, ""))


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM and SIGINT set during the block."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
