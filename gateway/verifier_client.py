"""The gateway's one session with a verifier: submissions and aborts go up, events come down and find their sequence.

It keeps the session alive for ever and knows whether it is up. It knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from foretoken import rpc, wire
from foretoken.errors import ForetokenError, UnavailableError, error_from_code
from gateway import verifier_wire
from gateway.messages import NewTokens, SequenceSink, SequenceSpec, VerifierInfo
from protos import verifier_pb2, verifier_pb2_grpc

logger = logging.getLogger(__name__)

# A verifier sends a heartbeat a second; one that is silent for longer than this is dead, even if its socket is not.
SILENCE_LIMIT_S = 5.0
# A timer that is so late tells of a process that was stopped or starved.
STALL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 2.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
# What a client learns of a fault of ours.
INTERNAL_ERROR = "internal error"
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


@dataclass(slots=True)
class _Route:
    """Where the events of one running sequence go. ``next_offset`` counts the output tokens that were passed on."""

    sink: SequenceSink
    attempt: int
    next_offset: int


class VerifierClient:
    """One ``VerifierService.Session``. All methods are called on the event loop that ``run`` runs on."""

    def __init__(
        self,
        address: str,
        *,
        on_change: Callable[[], Awaitable[None]] | None = None,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """``on_change`` is awaited each time that ``is_up`` changes."""
        self.address = address
        self._on_change = on_change
        self._silence_limit_s = silence_limit_s
        self._routes: dict[tuple[str, int], _Route] = {}
        self._outgoing: asyncio.Queue[verifier_pb2.SessionRequest] | None = None
        # Any: the generated stub is untyped.
        self._stub: Any = None
        self._info: VerifierInfo | None = None
        self._fingerprint = ""
        self._room: int | None = None
        self._up = asyncio.Event()
        self._reason = "the verifier has not been reached yet"

    @property
    def is_up(self) -> bool:
        """Whether submissions are taken now: not while the session is down, nor while the verifier drains."""
        return self._up.is_set()

    @property
    def reason(self) -> str:
        """Why it is not up."""
        return self._reason

    def has_room(self, num_sequences: int) -> bool:
        """Whether the verifier would take so many new sequences, by its last word and what was submitted since."""
        return not num_sequences or self._room is None or self._room >= num_sequences

    @property
    def fingerprint(self) -> str:
        """The model's, of the last session; empty before the first."""
        return self._fingerprint

    @property
    def info(self) -> VerifierInfo:
        """The verifier's latest GetInfo. Raises UnavailableError before the first one."""
        if self._info is None:
            raise UnavailableError(f"not ready: {self._reason}")
        return self._info

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait at the verifier for this gateway."""
        return len(self._routes)

    async def run(self) -> None:
        """Keep a session until cancelled. Breaks are retried for ever, with at most a second in between."""
        backoff = FIRST_BACKOFF_S
        while True:
            had_session = False
            try:
                async with rpc.async_channel(self.address) as channel:
                    self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                    await self._session()
            except UnavailableError as error:
                had_session = await self._down(error.message)
            except BaseException:
                await self._down("the gateway is stopping", level=logging.INFO)
                raise
            if had_session:
                backoff = FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    async def wait_up(self) -> None:
        """Return once the session is up."""
        await self._up.wait()

    def submit(self, spec: SequenceSpec, sink: SequenceSink) -> None:
        """Start one sequence; its events go to ``sink``. Raises UnavailableError unless ``is_up``."""
        if self._outgoing is None or not self.is_up:
            raise UnavailableError(f"not ready: {self._reason}")
        key = (spec.request_id, spec.choice_index)
        assert key not in self._routes, key
        self._routes[key] = _Route(sink, spec.attempt, len(spec.output_ids))
        if self._room is not None and not spec.attempt:
            self._room -= 1
        self._outgoing.put_nowait(verifier_pb2.SessionRequest(submit=verifier_wire.spec_to_proto(spec)))

    def abort(self, request_id: str, choice_index: int, *, kept_tokens: int) -> None:
        """End a sequence early; its sink still gets ``on_finished``, with figures up to ``kept_tokens`` tokens."""
        self._send_abort(verifier_pb2.Abort(request_id=request_id, choice_index=choice_index, kept_tokens=kept_tokens))

    def drop(self, request_id: str, choice_index: int) -> None:
        """End a sequence that nobody wants any more: its sink gets nothing from now on."""
        if self._routes.pop((request_id, choice_index), None) is not None:
            self._send_abort(verifier_pb2.Abort(request_id=request_id, choice_index=choice_index))

    async def fetch_info(self) -> VerifierInfo:
        """Ask the verifier for fresh figures. Raises UnavailableError if it does not answer."""
        if self._stub is None:
            raise UnavailableError(f"not ready: {self._reason}")
        try:
            response = await self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the verifier does not answer: {error.code().name}") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnavailableError("the verifier's session ended meanwhile") from None
        self._info = verifier_wire.info_from_proto(response)
        return self._info

    async def call(self, method: str, message: Any, *, timeout_s: float) -> Any:
        """The answer of a unary call beside the session. Raises the ForetokenError that its status stands for."""
        if self._stub is None:
            raise UnavailableError(f"not ready: {self._reason}")
        try:
            return await getattr(self._stub, method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnavailableError("the verifier's session ended meanwhile") from None

    def _send_abort(self, abort: verifier_pb2.Abort) -> None:
        # When the session ends, the verifier aborts all of its sequences: nothing to send then.
        if self._outgoing is not None:
            self._outgoing.put_nowait(verifier_pb2.SessionRequest(abort=abort))

    async def _session(self) -> None:
        """One session from connect to break. Always raises: UnavailableError when it breaks."""
        outgoing: asyncio.Queue[verifier_pb2.SessionRequest] = asyncio.Queue()
        call = self._stub.Session()
        writer = asyncio.create_task(_write(call, outgoing))
        watch = _SilenceWatch(call, CONNECT_TIMEOUT_S)
        try:
            async for response in call:
                watch.touch()
                self._room = response.queue_room if response.HasField("queue_room") else None
                if response.HasField("started"):
                    await self.fetch_info()
                    watch.limit_s = self._silence_limit_s
                    self._outgoing = outgoing
                    self._fingerprint = response.started.model_fingerprint
                    self._up.set()
                    logger.info("verifier session up", extra={"verifier": self.address})
                    await self._changed()
                if response.draining or any(error.code == _UNAVAILABLE for error in response.errors):
                    await self._refuse("the verifier is draining")
                self._dispatch(response)
        except grpc.aio.AioRpcError as error:
            what = "cannot be reached" if self._outgoing is None else "lost its session"
            raise UnavailableError(f"the verifier {what}: {error.code().name}") from error
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
        """The verifier takes no more sequences in this session; running ones go on."""
        if self.is_up:
            self._reason = reason
            self._up.clear()
            logger.info("verifier takes no more", extra={"verifier": self.address, "reason": reason})
            await self._changed()

    async def _down(self, reason: str, *, level: int = logging.WARNING) -> bool:
        """Give up what the session held; whether there was one."""
        had_session = self._outgoing is not None
        if not had_session and reason != self._reason:
            # Once for each reason, not for each attempt; at a start this is what is to be expected for a while.
            logger.info("verifier not reached", extra={"verifier": self.address, "reason": reason})
        self._reason = reason
        self._outgoing = None
        self._up.clear()
        routes, self._routes = self._routes, {}
        if had_session:
            extra = {"verifier": self.address, "reason": reason, "num_sequences": len(routes)}
            logger.log(level, "verifier session down", extra=extra)
        for route in routes.values():
            route.sink.on_lost(reason)
        if had_session:
            await self._changed()
        return had_session

    async def _changed(self) -> None:
        if self._on_change is not None:
            await self._on_change()

    def _dispatch(self, response: verifier_pb2.SessionResponse) -> None:
        for tokens in response.tokens:
            try:
                self._on_tokens(tokens)
            except Exception:
                # A fault in one sequence's text must not end the session of all the others.
                logger.exception("cannot take tokens", extra={"request_id": tokens.request_id})
                self._fail(tokens)
        for finished in response.finished:
            route = self._take_route(finished)
            if route is not None:
                route.sink.on_finished(verifier_wire.finished_from_proto(finished))
        for error in response.errors:
            route = self._take_route(error)
            if route is None:
                continue
            if error.code == _UNAVAILABLE:
                route.sink.on_refused(error.message)
            else:
                route.sink.on_error(error_from_code(error.code, error.message, error.field))

    def _take_route(self, event: verifier_pb2.Finished | verifier_pb2.SequenceError) -> _Route | None:
        """The route of a sequence that ends; None if it was dropped, or if the event is of another attempt."""
        key = (event.request_id, event.choice_index)
        route = self._routes.get(key)
        if route is None or route.attempt != event.attempt:
            return None
        return self._routes.pop(key)

    def _on_tokens(self, tokens: verifier_pb2.Tokens) -> None:
        key = (tokens.request_id, tokens.choice_index)
        route = self._routes.get(key)
        if route is None or route.attempt != tokens.attempt:
            return
        known = route.next_offset - tokens.offset
        if known < 0:
            raise ValueError(f"output tokens {route.next_offset}-{tokens.offset} never came")
        ids = tuple(tokens.token_ids[known:])
        if not ids and not tokens.prompt_logprobs:
            return
        route.next_offset += len(ids)
        route.sink.on_tokens(
            NewTokens(
                ids,
                tuple(tokens.sources[known:]) or (0,) * len(ids),
                wire.logprobs_from_proto(tokens.logprobs[known:]) if tokens.logprobs else (),
                wire.logprobs_from_proto(tokens.prompt_logprobs) if tokens.prompt_logprobs else (),
                tokens.num_cached_tokens if tokens.HasField("num_cached_tokens") else None,
            )
        )

    def _fail(self, tokens: verifier_pb2.Tokens) -> None:
        """Give one sequence up, with an internal error for its client."""
        route = self._routes.get((tokens.request_id, tokens.choice_index))
        if route is not None:
            self.drop(tokens.request_id, tokens.choice_index)
            route.sink.on_error(ForetokenError(INTERNAL_ERROR))


def _is_cancelled() -> bool:
    """Whether the running task is: a call that was cancelled elsewhere raises CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(call: Any, outgoing: asyncio.Queue[verifier_pb2.SessionRequest]) -> None:
    """Send what is in the queue, in order. If the call breaks this ends; its reader learns the reason."""
    while True:
        await call.write(await outgoing.get())


class _SilenceWatch:
    """Cancels a call after too long without a message; one timer that is set anew only when it fires."""

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
            # We were the ones who stood still: what came meanwhile has not been read yet.
            self._last = now
        if self._last + self.limit_s > now:
            self._timer = self._loop.call_at(self._last + self.limit_s, self._check)
            return
        self.expired = True
        with contextlib.suppress(asyncio.InvalidStateError):
            self._call.cancel()
