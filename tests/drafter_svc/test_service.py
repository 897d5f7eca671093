from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from drafter_svc.service import SERVICE_NAME, DrafterService
from drafter_svc.thread import DrafterThread
from foretoken import rpc
from foretoken.drafter import Drafter
from foretoken.drafting import TargetInfo
from foretoken.errors import ConfigError, ForetokenError, InvalidRequestError, PreconditionError, UnavailableError
from foretoken.tracing import Tracer
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import LAYOUT_VERSION, ArenaLayout
from foretoken.transports.doorbell import Waiter
from foretoken.transports.draft_wire import batch_from_proto, request_to_proto, target_to_proto
from foretoken.transports.transport import TransportClosedError, TransportCounters
from protos import drafter_pb2, drafter_pb2_grpc
from tests.support.draft_requests import draft_request
from tests.support.environment import child_environment
from tests.support.mirror_drafter import POISON_SALT, MirrorDrafter

TARGET = TargetInfo(checkpoint_hash="m", vocab_size=1000, max_model_len=1024, max_batch_slots=4, max_nodes=8)
CHALLENGE = b"c" * 32
EPOCH = 11
LONG_S = 600.0


class Served:
    """A drafter service in this process, and a stub to it."""

    def __init__(self, stub: Any, channel: grpc.aio.Channel, drafter: MirrorDrafter, thread: DrafterThread) -> None:
        self.stub = stub
        self.channel = channel
        self.drafter = drafter
        self.thread = thread

    async def attach(self, **changes: Any) -> drafter_pb2.AttachResponse:
        fields: dict[str, Any] = {
            "epoch": EPOCH,
            "target": target_to_proto(TARGET),
            "layout_version": LAYOUT_VERSION,
            "challenge": CHALLENGE,
        }
        response: drafter_pb2.AttachResponse = await translated(
            self.stub.Attach(drafter_pb2.AttachRequest(**(fields | changes)))
        )
        return response

    async def attach_arena(self) -> ArenaTransport:
        transport = ArenaTransport(ArenaLayout.of_target(TARGET), EPOCH, CHALLENGE, TransportCounters())
        listener = ArenaListener()
        attaching = asyncio.ensure_future(self.attach(arena_socket=listener.path))
        await asyncio.to_thread(Waiter((listener.fileno(),)).wait, None)
        transport.hand_over(listener.accept())
        response = await attaching
        assert response.transport == "shared-memory"
        assert response.challenge_digest == hashlib.sha256(CHALLENGE).digest()
        transport.check_self_test()
        return transport

    async def info(self) -> drafter_pb2.GetInfoResponse:
        info: drafter_pb2.GetInfoResponse = await translated(self.stub.GetInfo(drafter_pb2.GetInfoRequest()))
        return info

    async def detached(self) -> drafter_pb2.GetInfoResponse:
        """Return GetInfo once the drafter has noticed; the suite's time limit ends the wait."""
        while (info := await self.info()).attached:
            await asyncio.sleep(0.01)
        return info


async def translated(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise rpc.error_from_rpc(error) from error


@asynccontextmanager
async def served(folder: Path, tracer: Tracer | None = None) -> AsyncIterator[Served]:
    drafter = MirrorDrafter()
    thread = DrafterThread(lambda: drafter, counts_rounds=tracer is not None)
    server = rpc.async_server()
    address = f"unix:{folder}/d.sock"
    rpc.bind(server, address)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(DrafterService("mirror", thread, tracer), server)
    await server.start()
    await asyncio.wrap_future(thread.ready)
    async with rpc.async_channel(address) as channel:
        yield Served(drafter_pb2_grpc.DrafterServiceStub(channel), channel, drafter, thread)
    await asyncio.to_thread(thread.stop)
    await server.stop(1)
    rpc.remove_socket(address)


def proto(tokens: list[list[int]], **columns: Any) -> drafter_pb2.DraftRequest:
    return request_to_proto(draft_request(tokens, **({"epoch": EPOCH} | columns)))


def with_one_more_batch_slot(message: drafter_pb2.DraftRequest) -> drafter_pb2.DraftRequest:
    message.slots.append(1)
    return message


def test_stream_drafts_and_its_end_frees_the_drafter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            response = await service.attach()
            assert (response.name, response.algorithm, response.transport) == ("mirror", "MIRROR", "grpc")
            assert response.challenge_digest == hashlib.sha256(CHALLENGE).digest()
            call = service.stub.Draft()
            await call.write(proto([[5, 6], [9]], step_id=3, max_nodes=[3, 1]))
            batch = batch_from_proto(await call.read())
            assert batch is not None
            assert (batch.epoch, batch.step_id, batch.node_starts.tolist()) == (EPOCH, 3, [0, 3, 4])
            assert batch.tokens.tolist() == [6, 17, 0, 9]
            info = await service.info()
            assert (info.attached, info.epoch, info.transport) == (True, EPOCH, "grpc")
            assert info.gauges["slots"] == 2
            call.cancel()
            info = await service.detached()
            assert (info.epoch, info.transport, info.gauges["slots"]) == (0, "", 0)

    asyncio.run(scenario())


def test_release_forgets_batch_slots_of_this_epoch_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            await service.attach()
            call = service.stub.Draft()
            await call.write(proto([[5], [6]]))
            await call.read()
            with pytest.raises(PreconditionError, match="not attached to epoch 12"):
                await translated(service.stub.Release(drafter_pb2.ReleaseRequest(epoch=12, slots=[0])))
            await service.stub.Release(drafter_pb2.ReleaseRequest(epoch=EPOCH, slots=[0]))
            assert list(service.drafter.known) == [1]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"layout_version": LAYOUT_VERSION + 1},
            PreconditionError,
            f"layout version {LAYOUT_VERSION + 1}, this drafter has {LAYOUT_VERSION}",
        ),
        ({"target": drafter_pb2.TargetInfo()}, InvalidRequestError, "at least 1"),
        ({"arena_socket": "/nonexistent/s"}, UnavailableError, "no hand-over at /nonexistent/s"),
        ({"arena_socket": "x" * 200}, UnavailableError, "no hand-over"),
    ],
)
def test_attach_refuses(tmp_path: Path, changes: dict[str, Any], error: type[ForetokenError], message: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            with pytest.raises(error, match=message):
                await service.attach(**changes)
            assert not (await service.info()).attached

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        (proto([[5]], epoch=EPOCH + 1), PreconditionError, f"epoch {EPOCH + 1}, this attachment's is {EPOCH}"),
        (with_one_more_batch_slot(proto([[5]])), InvalidRequestError, "columns"),
        (proto([[5]] * 9), InvalidRequestError, "9 rows; at most 8"),
        (drafter_pb2.DraftRequest(epoch=EPOCH, new_tokens=[5]), InvalidRequestError, "offsets"),
        (proto([[5]], salts=[POISON_SALT]), UnavailableError, "poisoned"),
    ],
)
def test_a_bad_request_ends_the_attachment_and_not_the_drafter(
    tmp_path: Path, message: drafter_pb2.DraftRequest, error: type[ForetokenError], text: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            await service.attach()
            call = service.stub.Draft()
            await call.write(message)
            with pytest.raises(error, match=text):
                await translated(call.read())
            await service.detached()
            transport = await service.attach_arena()
            transport.close()

    asyncio.run(scenario())


def test_values_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            await service.attach()
            call = service.stub.Draft()
            message = proto([[5]])
            message.new_tokens[0] = 2**31
            await call.write(message)
            with pytest.raises(InvalidRequestError, match="32 bits"):
                await translated(call.read())

    asyncio.run(scenario())


def test_the_stream_needs_an_attachment_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            with pytest.raises(PreconditionError, match="Attach"):
                await translated(service.stub.Draft().read())
            await service.attach()
            call = service.stub.Draft()
            await call.write(proto([[5]]))
            await call.read()
            with pytest.raises(PreconditionError, match="has a Draft stream"):
                await translated(service.stub.Draft().read())
            await call.write(proto([[6]], step_id=2))
            assert (await call.read()).step_id == 2

    asyncio.run(scenario())


def test_a_new_attachment_ends_the_one_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            await service.attach()
            call = service.stub.Draft()
            await call.write(proto([[5]]))
            await call.read()
            first = await service.attach_arena()
            with pytest.raises(UnavailableError, match="another attachment"):
                await translated(call.read())
            second = await service.attach_arena()
            first.post(draft_request([[5]], epoch=EPOCH))
            with pytest.raises(TransportClosedError):
                await asyncio.to_thread(first.receive, LONG_S)
            second.post(draft_request([[5]], epoch=EPOCH))
            assert await asyncio.to_thread(second.receive, LONG_S) is not None
            first.close()
            second.close()
            assert (await service.detached()).gauges["slots"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", ["arena", "stream"])
def test_another_verifier_is_refused_until_the_first_has_gone(tmp_path: Path, transport: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            # Nobody holds it before the stream is open: the attaching verifier may be dead.
            await service.attach(epoch=EPOCH + 2)
            arena = await service.attach_arena() if transport == "arena" else None
            if arena is None:
                await service.attach()
                call = service.stub.Draft()
                await call.write(proto([[5]]))
                await call.read()
            with pytest.raises(PreconditionError, match="another verifier"):
                await service.attach(epoch=EPOCH + 1)
            if arena is not None:
                arena.post(draft_request([[5]], epoch=EPOCH))
                assert await asyncio.to_thread(arena.receive, LONG_S) is not None
                # The client knows of the end at once, even if the drafter does not yet.
                arena.close()
            else:
                await call.write(proto([[5]], step_id=2))
                assert (await call.read()).step_id == 2
                call.cancel()
                await service.detached()
            await service.attach(epoch=EPOCH + 1)
            assert (await service.info()).epoch == EPOCH + 1

    asyncio.run(scenario())


def test_what_a_drafter_raises_ends_the_arena_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as service:
            transport = await service.attach_arena()
            transport.post(draft_request([[5]], epoch=EPOCH, salts=[POISON_SALT]))
            with pytest.raises(TransportClosedError):
                await asyncio.to_thread(transport.receive, LONG_S)
            transport.close()
            again = await service.attach_arena()
            again.post(draft_request([[5]], epoch=EPOCH))
            assert await asyncio.to_thread(again.receive, LONG_S) is not None
            again.close()

    asyncio.run(scenario())


def test_a_drafter_that_is_not_warm_is_not_served() -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        loop = asyncio.get_running_loop()

        def make() -> Drafter:
            asyncio.run_coroutine_threadsafe(never.wait(), loop).result()
            return MirrorDrafter()

        thread = DrafterThread(make)
        service = DrafterService("mirror", thread)
        with pytest.raises(UnavailableError, match="warming up"):
            await service.GetInfo(drafter_pb2.GetInfoRequest(), None)
        with pytest.raises(UnavailableError, match="warming up"):
            await service.Attach(drafter_pb2.AttachRequest(), None)
        never.set()
        await asyncio.wrap_future(thread.ready)
        assert (await service.GetInfo(drafter_pb2.GetInfoRequest(), None)).algorithm == "MIRROR"
        await asyncio.to_thread(thread.stop)

    asyncio.run(scenario())


def test_a_drafter_that_cannot_be_made_says_why() -> None:
    def make() -> Drafter:
        raise ConfigError("no such table")

    thread = DrafterThread(make)
    assert isinstance(thread.ready.exception(30), ConfigError)
    with pytest.raises(UnavailableError):
        thread.gauges().result(30)
    thread.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_serves_health_and_reflection_and_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario() -> None:
        path = tmp_path / "d.sock"
        # A socket file, as a killed drafter leaves it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
            stale.bind(str(path))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.mirror_drafter", f"unix:{path}", env=child_environment()
        )
        async with rpc.async_channel(f"unix:{path}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            # Any: the stubs' types are of synchronous channels.
            reflection: Any = reflection_pb2_grpc
            call = reflection.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert names == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            call.cancel()
            process.send_signal(number)
            assert await process.wait() == 0
        assert not path.exists()

    asyncio.run(scenario())
