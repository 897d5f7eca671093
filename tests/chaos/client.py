"""Sends one request over REST or gRPC and records everything that comes, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import grpc
import httpx
import orjson
from google.protobuf import json_format

from foretoken import rpc
from protos import gateway_pb2, gateway_pb2_grpc
from tests.chaos.answer import Answer
from tests.chaos.requests import Request
from tests.chaos.transcript import ErrorEventError, EventStream, GenerateReader, GrpcReader, OpenAiReader, Reader

# Whatever dies on a CPU, an answer ends within this.
PATIENCE_S = 240.0
# Total time that a slow reader spends not reading.
SLOW_TOTAL_S = 4.0
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
# done: complete. dropped: by us. broken: the connection ended. failed: an error, or silence.
# gRPC's own words for a lost connection.
_CONNECTION_PHRASES = (
    "Broken pipe",
    "Connection reset",
    "GOAWAY",
    "Socket closed",
    "Stream removed",
    "failed to connect",
    "recvmsg",
    "sendmsg",
)
ItemT = TypeVar("ItemT")
Outcome = Literal["done", "dropped", "broken", "failed"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves: it leaves after ``drop_after_s`` and waits ``slow_s`` between reads."""

    drop_after_s: float | None = None
    slow_s: float = 0.0


POLITE = Manner()


@dataclass(slots=True)
class Record:
    """One request's life at the client. Times are time.monotonic().

    Attributes:
        status: HTTP's; None for gRPC, or without an answer.
        ticks: when a choice got text or tokens, and which choice; only for streams.
    """

    request: Request
    manner: Manner
    sent_at: float
    ended_at: float = 0.0
    outcome: Outcome = "done"
    status: int | None = None
    error: str = ""
    answer: Answer = field(default_factory=Answer)
    ticks: list[tuple[float, int]] = field(default_factory=list)


class Client:
    """A client of both protocols; each REST request has a connection of its own."""

    def __init__(self, url: str, grpc_address: str, patience_s: float = PATIENCE_S) -> None:
        self._url = url
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            trust_env=False, timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._channel = rpc.async_channel(grpc_address)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def send(self, request: Request, manner: Manner = POLITE) -> Record:
        """Send a request once; return the record. Server and connection errors are outcomes."""
        record = Record(request, manner, sent_at=time.monotonic())
        work = self._call(record) if request.api == "grpc" else self._post(record)
        try:
            async with asyncio.timeout(manner.drop_after_s or self._patience_s):
                await work
        except TimeoutError:
            record.outcome = "failed" if manner.drop_after_s is None else "dropped"
            record.error = f"no end within {self._patience_s:g} s" if manner.drop_after_s is None else ""
        except ErrorEventError as error:
            record.outcome, record.error = "failed", f"error event: {error}"
        except httpx.TransportError as error:
            record.outcome, record.error = "broken", repr(error)
        except grpc.aio.AioRpcError as error:
            record.outcome = "broken" if _is_connections(error) else "failed"
            record.error = f"{error.code().name}: {error.details()}"
        record.ended_at = time.monotonic()
        return record

    async def _post(self, record: Record) -> None:
        request = record.request
        reader: Reader = GenerateReader() if request.api == "generate" else OpenAiReader(chat=request.api == "chat")
        record.answer = reader.answer
        content, headers = orjson.dumps(request.body), {"content-type": "application/json"}
        path = self._url + _PATHS[request.api]
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            record.status = response.status_code
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                record.outcome, record.error = "failed", f"status {response.status_code}: {body[:300]}"
            elif request.stream:
                await self._read_events(record, response, EventStream(reader))
            else:
                reader.feed(orjson.loads(await response.aread()))
                reader.answer.ended = True

    async def _read_events(self, record: Record, response: httpx.Response, stream: EventStream) -> None:
        async for data in _slowly(response.aiter_raw(), record.manner.slow_s):
            _note(record, stream.feed(data))
        stream.end()

    async def _call(self, record: Record) -> None:
        message = json_format.ParseDict(record.request.body, gateway_pb2.GenerateRequest())
        reader = GrpcReader(message)
        record.answer = reader.answer
        # Wait until there is a connection: without a gateway the request has not begun.
        call = self._stub.Generate(message, wait_for_ready=True)
        try:
            async for response in _slowly(call, record.manner.slow_s):
                _note(record, reader.feed(response))
            reader.answer.ended = True
        finally:
            call.cancel()


def _is_connections(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the connection failed; a server's own UNAVAILABLE has the same status."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(phrase in details for phrase in _CONNECTION_PHRASES)


def _note(record: Record, choices: list[int]) -> None:
    now = time.monotonic()
    record.ticks += [(now, index) for index in dict.fromkeys(choices)]


async def _slowly(source: AsyncIterable[ItemT], slow_s: float) -> AsyncIterator[ItemT]:
    """Yield the items of ``source``, with a rest before each until they add up to SLOW_TOTAL_S."""
    left_s = SLOW_TOTAL_S
    async for item in source:
        yield item
        if slow_s and left_s > 0:
            await asyncio.sleep(slow_s)
            left_s -= slow_s
