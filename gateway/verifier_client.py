"""Keep the gateway's session with one verifier: send submissions and aborts, receive events.

It reconnects for ever and knows whether the session is up. It knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from foretoken import rpc
from foretoken.errors import UnavailableError
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from foretoken.probes import Listener, listener_at
from gateway import verifier_wire
from gateway.messages import SequenceSink, SequenceSpec, VerifierInfo
from gateway.sequence_routes import UNAVAILABLE, SequenceRoutes
from gateway.verifier_figures import VerifierFigures
from protos import verifier_pb2, verifier_pb2_grpc

logger = logging.getLogger(__name__)

# A verifier sends a heartbeat every second. After this silence it is dead, even if its socket
# lives.
SILENCE_LIMIT_S = 5.0
# A timer that fires so late means that this process was stopped or starved.
STALL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 2.0
# Why there is no session with a verifier that never had one, or that had one.
NOT_THERE = "the verifier is starting, or not there: nothing listens at its address yet"
STARTING = "the verifier is still starting (the first start on a machine compiles kernels, which may take some minutes)"
RESTARTING = "the verifier takes connections but does not answer: it is starting again, or hangs"
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0


class VerifierClient:
    """Keeps one ``VerifierService.Session``. Call all methods on the event loop of ``run``."""

    def __init__(
        self,
        address: str,
        *,
        on_change: Callable[[], Awaitable[None]] | None = None,
        on_figures: Callable[[VerifierClient], None] | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
        credentials: LinkCredentials = NO_CREDENTIALS,
    ) -> None:
        """``on_change`` is awaited each time ``is_up`` or ``awaits_drafters`` changes.

        ``on_figures`` is called at once when ``is_up``, ``figures`` or ``num_sequences`` may have
        changed: before lost sequences are placed elsewhere.
        """
        self.address = address
        # Why the session is not up.
        self.reason = "the verifier has not been reached yet"
        # The model's, in the last session; empty before the first.
        self.fingerprint = ""
        # Whether the verifier, which takes submissions, waits for
        # drafters to attach after its start.
        self.awaits_drafters = False
        # Whether its streams end here and nothing else starts: it is no longer wanted.
        self.is_leaving = False
        self.figures = VerifierFigures()
        self._on_change = on_change
        self._on_figures = on_figures
        self._silence_limit_s = silence_limit_s
        self._credentials = credentials
        self._routes = SequenceRoutes(self._send_abort)
        self._outgoing: asyncio.Queue[verifier_pb2.SessionRequest] | None = None
        # Any: the generated stub is untyped.
        self._stub: Any = None
        self._info: VerifierInfo | None = None
        self._is_draining = False
        self._up = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Return whether the verifier takes submissions now: the session is up, and it does not drain."""
        return self._up.is_set()

    @property
    def info(self) -> VerifierInfo:
        """The verifier's latest GetInfo. Raises UnavailableError before the first one."""
        if self._info is None:
            raise UnavailableError(f"not ready: {self.reason}")
        return self._info

    @property
    def num_sequences(self) -> int:
        """This gateway's sequences that run or wait at the verifier."""
        return len(self._routes)

    async def leave(self) -> None:
        """Submit no more sequences; running ones continue."""
        if not self.is_leaving:
            self.is_leaving = True
            await self._refuse("the verifier is no longer listed")

    async def stay(self) -> None:
        """Undo ``leave``."""
        if self.is_leaving:
            self.is_leaving = False
            if self._outgoing is not None and not self._is_draining:
                self._up.set()
                self._figures_changed()
                await self._changed()

    async def run(self) -> None:
        """Keep a session until cancelled; after a break, reconnect at least once a second.

        Raises CancelledError once it is cancelled.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            had_session = False
            try:
                async with rpc.async_channel(self.address, self._credentials) as channel:
                    self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                    await self._session()
            except UnavailableError as error:
                had_session = await self._down(error.message)
                if _is_cancelled():
                    # gRPC loses a cancellation that comes while a call is prepared.
                    raise asyncio.CancelledError from None
            except BaseException:
                await self._down("the gateway ended the session", level=logging.INFO)
                raise
            if had_session:
                backoff = FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    async def wait_up(self) -> None:
        """Return once the session is up."""
        await self._up.wait()

    def submit(self, spec: SequenceSpec, sink: SequenceSink) -> None:
        """Start one sequence; its events go to ``sink``.

        Raises UnavailableError unless ``is_up``.
        """
        if self._outgoing is None or not self.is_up:
            raise UnavailableError(f"not ready: {self.reason}")
        self._routes.add(spec, sink)
        if not spec.attempt:
            self.figures.submitted()
        self._figures_changed()
        self._outgoing.put_nowait(verifier_pb2.SessionRequest(submit=verifier_wire.spec_to_proto(spec)))

    def abort(self, request_id: str, choice_index: int, *, kept_tokens: int) -> None:
        """End it early; its sink gets ``on_finished`` with figures up to ``kept_tokens``."""
        self._send_abort(request_id, choice_index, kept_tokens)

    def drop(self, request_id: str, choice_index: int) -> None:
        """End a sequence that nobody wants any more; its sink gets nothing from now on."""
        self._routes.drop(request_id, choice_index)
        self._figures_changed()

    async def fetch_info(self) -> VerifierInfo:
        """Ask the verifier for fresh figures. Raises UnavailableError if it does not answer."""
        try:
            response = await self._call("GetInfo", verifier_pb2.GetInfoRequest(), INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the verifier does not answer: {error.code().name}") from error
        self._info = verifier_wire.info_from_proto(response)
        return self._info

    async def call(self, method: str, message: Any, *, timeout_s: float) -> Any:
        """Return the answer to a unary call.

        Raises the ForetokenError that its status stands for.
        """
        try:
            return await self._call(method, message, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error

    async def _call(self, method: str, message: Any, timeout_s: float) -> Any:
        if self._stub is None:
            raise UnavailableError(f"not ready: {self.reason}")
        try:
            return await getattr(self._stub, method)(message, timeout=timeout_s)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnavailableError("the verifier's session ended meanwhile") from None

    def _send_abort(self, request_id: str, choice_index: int, kept_tokens: int | None = None) -> None:
        # When the session ends, the verifier aborts all of its sequences by itself.
        if self._outgoing is not None:
            abort = verifier_pb2.Abort(request_id=request_id, choice_index=choice_index, kept_tokens=kept_tokens)
            self._outgoing.put_nowait(verifier_pb2.SessionRequest(abort=abort))

    async def _session(self) -> None:
        """Run one session until it breaks. Always raises; UnavailableError when it breaks."""
        outgoing: asyncio.Queue[verifier_pb2.SessionRequest] = asyncio.Queue()
        call = self._stub.Session()
        writer = asyncio.create_task(_write(call, outgoing))
        watch = _SilenceWatch(call, CONNECT_TIMEOUT_S)
        try:
            async for response in call:
                watch.touch()
                self.figures.take(response, len(self._routes))
                was_awaiting = self.awaits_drafters
                if response.HasField("heartbeat"):
                    self.awaits_drafters = response.heartbeat.awaits_drafters
                if response.HasField("started"):
                    await self.fetch_info()
                    watch.limit_s = self._silence_limit_s
                    self._outgoing = outgoing
                    self.fingerprint = response.started.model_fingerprint
                    self._is_draining = response.draining
                    if not self.is_leaving:
                        self._up.set()
                    self._figures_changed()
                    logger.info("verifier session up", extra={"verifier": self.address})
                    await self._changed()
                elif self.awaits_drafters != was_awaiting:
                    await self._changed()
                if response.draining or any(error.code == UNAVAILABLE for error in response.errors):
                    self._is_draining = True
                    await self._refuse("the verifier is draining")
                self._routes.dispatch(response)
                self._figures_changed()
        except grpc.aio.AioRpcError as error:
            if self._outgoing is not None:
                raise UnavailableError(f"the verifier lost its session: {error.code().name}") from error
            raise UnavailableError(
                await _unreached(self.address, error.code(), had_session=bool(self.fingerprint))
            ) from error
        except asyncio.CancelledError:
            if not watch.expired or _is_cancelled():
                raise
            raise UnavailableError(f"the verifier was silent for {watch.limit_s:g} s") from None
        finally:
            self._stub = None
            watch.stop()
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        raise UnavailableError("the verifier ended the session")

    async def _refuse(self, reason: str) -> None:
        """Submit no more sequences in this session; running ones continue."""
        if self.is_up:
            self.reason = reason
            self._up.clear()
            self._figures_changed()
            logger.info("verifier takes no more", extra={"verifier": self.address, "reason": reason})
            await self._changed()

    async def _down(self, reason: str, *, level: int = logging.WARNING) -> bool:
        """Report a broken session to all sequences; return whether there was one."""
        had_session = self._outgoing is not None
        if not had_session and reason != self.reason:
            # Once per reason, not per attempt: at a start the verifier needs a while.
            logger.info("verifier not reached", extra={"verifier": self.address, "reason": reason})
        self.reason = reason
        self._outgoing = None
        self._up.clear()
        self.figures = VerifierFigures()
        self._figures_changed()
        if had_session:
            extra = {"verifier": self.address, "reason": reason, "num_sequences": len(self._routes)}
            logger.log(level, "verifier session down", extra=extra)
        self._routes.lose_all(reason)
        self._figures_changed()
        if had_session:
            await self._changed()
        return had_session

    def _figures_changed(self) -> None:
        if self._on_figures is not None:
            self._on_figures(self)

    async def _changed(self) -> None:
        if self._on_change is not None:
            await self._on_change()


async def _unreached(address: str, status: grpc.StatusCode, *, had_session: bool) -> str:
    """Return why there is no session: a verifier that starts listens long before it answers."""
    found = Listener.ANSWERS if status is not grpc.StatusCode.UNAVAILABLE else await listener_at(address)
    if found is Listener.SILENT:
        return RESTARTING if had_session else STARTING
    if found is Listener.NONE and not had_session:
        return NOT_THERE
    return f"the verifier cannot be reached: {status.name}"


def _is_cancelled() -> bool:
    """Return whether the running task is cancelled, and not only the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(call: Any, outgoing: asyncio.Queue[verifier_pb2.SessionRequest]) -> None:
    """Send the queue in order until the call breaks; the call's reader learns the reason."""
    while True:
        await call.write(await outgoing.get())


class _SilenceWatch:
    """Cancels a call after too long without a message.

    Its one timer is set again only when it fires.
    """

    def __init__(self, call: Any, limit_s: float) -> None:
        self._call = call
        self.limit_s = limit_s
        self.expired = False
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_at(self._last + limit_s, self._check)

    def touch(self) -> None:
        self._last = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now, due_at = self._loop.time(), self._timer.when()
        if now - due_at > STALL_S:
            # This process stood still and has not read what arrived meanwhile.
            self._last = now
        if self._last + self.limit_s > now:
            self._timer = self._loop.call_at(self._last + self.limit_s, self._check)
            return
        self.expired = True
        with contextlib.suppress(asyncio.InvalidStateError):
            self._call.cancel()
