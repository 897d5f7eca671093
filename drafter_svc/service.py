"""The gRPC service: translates protobuf. The drafter's thread does the work."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from drafter_svc.session import AttachedVerifier
from drafter_svc.thread import DrafterThread
from foretoken import __version__, limits, tracing
from foretoken.corpora import Corpora, CorpusInfo, token_ids_from
from foretoken.drafting import TargetInfo
from foretoken.errors import InvalidRequestError, PreconditionError, UnavailableError
from foretoken.tracing import Tracer
from foretoken.transports.arena_layout import LAYOUT_VERSION
from foretoken.transports.draft_wire import batch_to_proto, needs_to_proto, request_from_proto, target_from_proto
from foretoken.transports.transport import ROWS_PER_BATCH_SLOT
from protos import drafter_pb2, drafter_pb2_grpc

SPAN_NAME = "draft"
SERVICE_NAME: str = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name


class DrafterService(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one drafter to one verifier at a time.

    Raises ForetokenErrors, which foretoken.rpc turns into gRPC statuses.
    """

    def __init__(self, name: str, thread: DrafterThread, tracer: Tracer | None = None) -> None:
        """``name``: the drafter's name in requests and metrics.

        ``tracer``: None: tracing is off.
        """
        self._name = name
        self._thread = thread
        self._tracer = tracer

    async def Prepare(self, request: drafter_pb2.PrepareRequest, context: Any) -> drafter_pb2.PrepareResponse:
        self._check_ready()
        needs = await asyncio.wrap_future(self._thread.needs(_target_of(request.target)))
        return needs_to_proto(await asyncio.wrap_future(self._thread.algorithm()), needs)

    async def Attach(self, request: drafter_pb2.AttachRequest, context: Any) -> drafter_pb2.AttachResponse:
        """Attach a verifier.

        Raises PreconditionError for another layout version, and the errors of DrafterThread.attach.
        """
        self._check_ready()
        if request.layout_version != LAYOUT_VERSION:
            raise PreconditionError(
                f"arena: layout version {request.layout_version}, this drafter has {LAYOUT_VERSION}",
                field="layout_version",
            )
        target = _target_of(request.target)
        attachment, algorithm, digest = await asyncio.wrap_future(
            self._thread.attach(request.epoch, target, request.arena_socket)
        )
        if attachment.transport == "grpc":
            digest = hashlib.sha256(request.challenge).digest()
        return drafter_pb2.AttachResponse(
            name=self._name, algorithm=algorithm, challenge_digest=digest, transport=attachment.transport
        )

    async def Draft(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """Draft for each request of the stream.

        Raises PreconditionError without an attachment over gRPC, if it has a stream already, or for
        a request of another epoch.
        """
        attachment = self._thread.attachment
        if attachment is None or attachment.transport != "grpc":
            raise PreconditionError("the Draft stream needs an Attach without arena_socket before it")
        if attachment.is_streaming:
            raise PreconditionError("this attachment already has a Draft stream")
        attachment.is_streaming = True
        try:
            async with contextlib.aclosing(_until_ended(requests, attachment)) as messages:
                async for message in messages:
                    request = request_from_proto(
                        message, ROWS_PER_BATCH_SLOT * attachment.target.max_batch_slots, attachment.hidden_width
                    )
                    if request.epoch != attachment.epoch:
                        raise PreconditionError(f"epoch {request.epoch}, this attachment's is {attachment.epoch}")
                    yield batch_to_proto(await asyncio.wrap_future(self._thread.draft(attachment, request)))
        finally:
            # Not awaited: this also runs when the verifier is gone and the call is cancelled.
            self._thread.detach(attachment, "the verifier's stream ended")

    async def Release(self, request: drafter_pb2.ReleaseRequest, context: Any) -> drafter_pb2.ReleaseResponse:
        await asyncio.wrap_future(self._thread.release(request.epoch, list(request.slots)))
        return drafter_pb2.ReleaseResponse()

    async def TraceSequence(
        self, request: drafter_pb2.TraceSequenceRequest, context: Any
    ) -> drafter_pb2.TraceSequenceResponse:
        parent = tracing.trace_context(request.traceparent, request.tracestate)
        attachment = self._thread.attachment
        if self._tracer is not None and parent is not None and attachment is not None:
            rounds = await asyncio.wrap_future(self._thread.rounds(request.epoch, request.slot, request.generation))
            if rounds is not None:
                algorithm = await asyncio.wrap_future(self._thread.algorithm())
                attributes: tracing.Attributes = {
                    tracing.SPEC_DRAFTER: self._name,
                    tracing.SPEC_ALGORITHM: algorithm,
                    tracing.SPEC_TRANSPORT: attachment.transport,
                    tracing.SPEC_ROUNDS: rounds.num_rounds,
                    tracing.SPEC_TOKENS_SENT: rounds.num_tokens,
                    tracing.SPEC_DRAFT_TIME: rounds.busy_s,
                }
                self._tracer.record(SPAN_NAME, parent, rounds.began_ns, rounds.ended_ns, attributes)
        return drafter_pb2.TraceSequenceResponse()

    async def GetInfo(self, request: drafter_pb2.GetInfoRequest, context: Any) -> drafter_pb2.GetInfoResponse:
        self._check_ready()
        algorithm = await asyncio.wrap_future(self._thread.algorithm())
        gauges = await asyncio.wrap_future(self._thread.gauges())
        is_preparing = await asyncio.wrap_future(self._thread.is_preparing())
        attachment = self._thread.attachment
        return drafter_pb2.GetInfoResponse(
            version=__version__,
            name=self._name,
            algorithm=algorithm,
            attached=attachment is not None,
            epoch=0 if attachment is None else attachment.epoch,
            transport="" if attachment is None else attachment.transport,
            gauges=gauges,
            preparing=is_preparing,
        )

    async def AddCorpus(self, request: drafter_pb2.AddCorpusRequest, context: Any) -> drafter_pb2.AddCorpusResponse:
        limits.check_name("name", request.name)
        token_ids = token_ids_from(request.token_ids)
        corpora = await self._corpora()
        # Run outside the drafter's thread, which goes on drafting.
        info = await asyncio.to_thread(corpora.add, request.name, token_ids, append=request.append)
        return drafter_pb2.AddCorpusResponse(corpus=_corpus_to_proto(info))

    async def RemoveCorpus(
        self, request: drafter_pb2.RemoveCorpusRequest, context: Any
    ) -> drafter_pb2.RemoveCorpusResponse:
        corpora = await self._corpora()
        await asyncio.to_thread(corpora.remove, request.name)
        return drafter_pb2.RemoveCorpusResponse()

    async def ListCorpora(
        self, request: drafter_pb2.ListCorporaRequest, context: Any
    ) -> drafter_pb2.ListCorporaResponse:
        corpora = await self._corpora()
        infos = await asyncio.to_thread(corpora.list)
        return drafter_pb2.ListCorporaResponse(corpora=[_corpus_to_proto(info) for info in infos])

    async def _corpora(self) -> Corpora:
        self._check_ready()
        return await asyncio.wrap_future(self._thread.corpora())

    def _check_ready(self) -> None:
        if not self._thread.ready.done():
            raise UnavailableError("the drafter is warming up")


def _corpus_to_proto(info: CorpusInfo) -> drafter_pb2.Corpus:
    return drafter_pb2.Corpus(name=info.name, num_tokens=info.num_tokens)


def _target_of(message: drafter_pb2.TargetInfo) -> TargetInfo:
    if min(message.max_slots, message.max_nodes, message.vocab_size, message.block_size) < 1:
        raise InvalidRequestError(
            "target: batch slots, nodes, vocabulary and block size must be at least 1", field="target"
        )
    return target_from_proto(message)


async def _until_ended(
    requests: AsyncIterator[drafter_pb2.DraftRequest], attachment: AttachedVerifier
) -> AsyncGenerator[drafter_pb2.DraftRequest, None]:
    """Yield the stream's requests. Raises UnavailableError when the attachment ends first."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    def notify(future: Any) -> None:
        # The loop may be closed already if the drafter stops after the stream was cut off.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end, future.result())

    attachment.ended.add_done_callback(notify)
    while True:
        # Wrapped, because not every iterator's anext is a coroutine.
        reading = asyncio.ensure_future(_next(requests))
        try:
            await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not reading.done():
                reading.cancel()
        if ended.done():
            raise UnavailableError(f"the attachment has ended: {ended.result()}")
        message = reading.result()
        if message is None:
            return
        yield message


async def _next(requests: AsyncIterator[drafter_pb2.DraftRequest]) -> drafter_pb2.DraftRequest | None:
    """Return the next request; None at the end of the stream."""
    return await anext(requests, None)
