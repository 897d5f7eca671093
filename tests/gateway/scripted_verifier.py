"""A VerifierService with tokens scripted by the test, on a real gRPC server on a socket file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import grpc

from foretoken import rpc
from foretoken.errors import PreconditionError
from gateway.generation import Generation
from gateway.output import Output
from gateway.server import Gateway
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
ABORT = common_pb2.FINISH_REASON_ABORT
# Between two looks at an output that is not read yet.
LOOK_S = 0.001


class Player:
    """One running sequence, as its script sees it."""

    def __init__(
        self,
        sequence: verifier_pb2.Sequence,
        send: Callable[[verifier_pb2.SessionResponse], None],
        gateway: Gateway | None,
    ) -> None:
        self.sequence = sequence
        self.num_tokens = len(sequence.output_token_ids)
        self.aborted = asyncio.Event()
        self.finished = asyncio.Event()
        self._send = send
        self._gateway = gateway

    @property
    def _key(self) -> dict[str, object]:
        return {
            "request_id": self.sequence.request_id,
            "choice_index": self.sequence.choice_index,
            "attempt": self.sequence.attempt,
        }

    def tokens(
        self,
        ids: Iterable[int],
        sources: Iterable[int] | None = None,
        logprobs: Iterable[common_pb2.TokenLogprobs] = (),
        prompt_logprobs: Iterable[common_pb2.TokenLogprobs] = (),
        offset: int | None = None,
        attempt: int | None = None,
        num_cached_tokens: int | None = None,
        tree: verifier_pb2.VerifiedTree | None = None,
    ) -> None:
        """Send one step's tokens. By default all but the last one are accepted drafts."""
        ids = list(ids)
        if sources is None:
            sources = [1] * (len(ids) - 1) + [0]
        message = verifier_pb2.Tokens(
            **{**self._key, "attempt": self.sequence.attempt if attempt is None else attempt},
            offset=self.num_tokens if offset is None else offset,
            token_ids=ids,
            sources=sources,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            tree=tree,
        )
        if offset is None:
            self.num_tokens += len(ids)
        self._send(verifier_pb2.SessionResponse(tokens=[message]))

    async def taken(self) -> None:
        """Wait until the gateway's reader has all tokens, so that
        the next message makes a delta of its own.

        The gateway merges what arrives before its reader looks, which on a busy machine
        may be any two messages. Return too when nobody reads any more, or if the
        gateway runs in another process.
        """
        if self._gateway is None:
            await asyncio.sleep(0)
            return
        while not self.aborted.is_set() and self._is_unread(self._gateway):
            await asyncio.sleep(LOOK_S)

    def _is_unread(self, gateway: Gateway) -> bool:
        """Return whether tokens are on their way, or
        wait for a reader of this sequence's output.
        """
        for generation, _, _ in gateway.core.running._running.values():
            for output in generation.outputs:
                spec = output.spec
                if (spec.request_id, spec.choice_index) == (self.sequence.request_id, self.sequence.choice_index):
                    return self._is_coming(output) or _waits_for_reader(generation, output)
        return False

    def _is_coming(self, output: Output) -> bool:
        """Return whether some tokens have not reached an output that still takes them."""
        return not output.ended and output.error is None and len(output.token_ids) < self.num_tokens

    def finish(
        self,
        reason: int = LENGTH,
        stats: common_pb2.SpeculationStats | None = None,
        stop_token_id: int | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        finished = verifier_pb2.Finished(
            **self._key,
            reason=reason,
            num_prompt_tokens=len(self.sequence.prompt_token_ids),
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=self.num_tokens,
            speculation=stats,
            stop_token_id=stop_token_id,
            queue_ms=1.5,
            prefill_ms=2.5,
            decode_ms=3.5,
        )
        self._send(verifier_pb2.SessionResponse(finished=[finished]))
        self.finished.set()

    def error(self, code: grpc.StatusCode, message: str, field: str = "") -> None:
        error = verifier_pb2.SequenceError(**self._key, code=code.value[0], message=message, field=field)
        self._send(verifier_pb2.SessionResponse(errors=[error]))


def _waits_for_reader(generation: Generation, output: Output) -> bool:
    """Return whether an output has news that its reader has not seen.

    One that wants the whole leaves it there.
    """
    return output.index in generation._news._changed


Script = Callable[[Player], Awaitable[None]]


def steps(*runs: Iterable[int], reason: int = LENGTH, stats: common_pb2.SpeculationStats | None = None) -> Script:
    """Return a script: one delta for each run of tokens, then the end, or an abort's end."""

    async def play(player: Player) -> None:
        for run in runs:
            if player.aborted.is_set():
                break
            player.tokens(run)
            await player.taken()
        player.finish(ABORT if player.aborted.is_set() else reason, stats)

    return play


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Plays ``script`` for every submitted sequence and records the session's messages."""

    def __init__(self, vocab_size: int, max_model_len: int = 128) -> None:
        self.script: Script = steps([1], [2])
        # Whose readers the scripts can wait for; None: it runs in another process.
        self.gateway: Gateway | None = None
        self.submitted: list[verifier_pb2.Sequence] = []
        self.aborts: list[verifier_pb2.Abort] = []
        self.arrived = asyncio.Condition()
        self.heartbeats = True
        self.num_flushes = 0
        # Sent in every message; None: not sent.
        self.queue_room: int | None = None
        # Sent in every message; None: not sent.
        self.load: verifier_pb2.Load | None = None
        self.num_sessions = self.num_ended_sessions = 0
        # Sent in every heartbeat, of which a session's first message has one.
        self.awaits_drafters = False
        self.info = verifier_pb2.GetInfoResponse(
            version="test",
            epoch=1,
            model_name="scripted",
            model_fingerprint="fp",
            device="CPU",
            dtype="float32",
            mode="strict",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=16,
            num_blocks=10,
            num_free_blocks=4,
            num_running=3,
            num_waiting=2,
            num_preemptions=5,
            num_plain_batch_steps=7,
            overlap_blocked_steps={"catching_up": 11},
            fallback_reasons={"first_step": 12},
            drafters=[
                verifier_pb2.DrafterState(
                    name="ngram",
                    algorithm="NGRAM",
                    transport="shared-memory",
                    state="attached",
                    num_attaches=1,
                    num_drafts=20,
                    num_draft_tokens=60,
                    num_accepted_tokens=30,
                    accepted_per_position=[20, 10],
                    num_awaited=25,
                    wait_us=900,
                )
            ],
        )
        self.players: dict[tuple[str, int], Player] = {}
        self._calls: list[asyncio.Task[None]] = []
        self._sessions: list[asyncio.Queue[verifier_pb2.SessionResponse]] = []

    def drain(self) -> None:
        """Announce to every session that no more sequences are taken."""
        for outgoing in self._sessions:
            outgoing.put_nowait(verifier_pb2.SessionResponse(draining=True))

    async def GetInfo(
        self, request: verifier_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> verifier_pb2.GetInfoResponse:
        return self.info

    async def FlushCache(
        self, request: verifier_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> verifier_pb2.FlushCacheResponse:
        self.num_flushes += 1
        if self.info.num_running:
            raise PreconditionError("requests run")
        return verifier_pb2.FlushCacheResponse(num_blocks=5)

    async def Session(
        self, request_iterator: AsyncIterator[verifier_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[verifier_pb2.SessionResponse, None]:
        self.num_sessions += 1
        outgoing: asyncio.Queue[verifier_pb2.SessionResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, outgoing.put_nowait))
        self._sessions.append(outgoing)
        started = verifier_pb2.SessionStarted(epoch=self.info.epoch, model_fingerprint=self.info.model_fingerprint)
        yield verifier_pb2.SessionResponse(
            started=started, queue_room=self.queue_room, load=self.load, heartbeat=self._heartbeat()
        )
        try:
            while True:
                try:
                    response = await asyncio.wait_for(outgoing.get(), 0.2)
                except TimeoutError:
                    if not self.heartbeats:
                        continue
                    response = verifier_pb2.SessionResponse(heartbeat=self._heartbeat())
                if self.queue_room is not None:
                    response.queue_room = self.queue_room
                if self.load is not None:
                    response.load.CopyFrom(self.load)
                yield response
        finally:
            self.num_ended_sessions += 1
            reader.cancel()

    def _heartbeat(self) -> verifier_pb2.Heartbeat:
        return verifier_pb2.Heartbeat(awaits_drafters=self.awaits_drafters)

    async def _read(
        self,
        requests: AsyncIterator[verifier_pb2.SessionRequest],
        send: Callable[[verifier_pb2.SessionResponse], None],
    ) -> None:
        async for request in requests:
            if request.HasField("submit"):
                player = Player(request.submit, send, self.gateway)
                self.players[player.sequence.request_id, player.sequence.choice_index] = player
                self.submitted.append(request.submit)
                self._calls.append(asyncio.ensure_future(self.script(player)))
            else:
                self.aborts.append(request.abort)
                self.players[request.abort.request_id, request.abort.choice_index].aborted.set()
            async with self.arrived:
                self.arrived.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; each message of a session checks it."""
        async with self.arrived:
            await self.arrived.wait_for(condition)


@contextlib.asynccontextmanager
async def serving(verifier: ScriptedVerifier, socket: Path) -> AsyncIterator[str]:
    """Serve the verifier with a gRPC server; yield its address."""
    server = rpc.async_server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    address = f"unix:{socket}"
    rpc.bind(server, address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
