"""One suite over all transports.

Arena and stream run against a drafter in a process of its own; the third runs in this process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from foretoken import rpc
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.transports.draft_wire import target_from_proto
from foretoken.transports.transport import DraftTransport, TransportClosedError
from protos import drafter_pb2, drafter_pb2_grpc
from tests.support.draft_requests import draft_request, draft_requests
from tests.support.environment import child_environment
from tests.support.mirror_drafter import POISON_SALT, MirrorDrafter
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters import remote as drafter_client
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import (
    MAX_CONSECUTIVE_FAILURES,
    CircuitBreaker,
    DraftSource,
)

Kind = Literal["shared-memory", "grpc", "in-process"]
PROCESS_KINDS: tuple[Kind, ...] = ("shared-memory", "grpc")
KINDS: tuple[Kind, ...] = (*PROCESS_KINDS, "in-process")
TARGET = TargetInfo(checkpoint_hash="m", vocab_size=1000, max_model_len=1024, max_batch_slots=6, max_nodes=16)
EPOCH = 11
TOKEN_CAPACITY = 16
# Nothing here waits so long: the suite's time limit ends a test that hangs.
LONG_S = 600.0
SHORT_S = 0.05


class DrafterProcess:
    """A mirror drafter in its own process, at an address that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.mirror_drafter", self.address]
        self._process = subprocess.Popen(command, env=child_environment())

    def stop(self) -> None:
        """Stop the process; return when every thread has stopped, as a signal takes its time."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        until(lambda: all(_state(thread) in "TX" for thread in threads.iterdir()))

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def info(self) -> drafter_pb2.GetInfoResponse:
        with rpc.sync_channel(self.address) as channel:
            info: drafter_pb2.GetInfoResponse = drafter_pb2_grpc.DrafterServiceStub(channel).GetInfo(
                drafter_pb2.GetInfoRequest(), wait_for_ready=True
            )
            return info


def _state(thread: Path) -> str:
    """Return the thread's state as the kernel names it: R, S, T, ...; X (dead) if it is gone."""
    try:
        return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread or process; the suite's time limit ends a wait in vain."""
    while not condition():
        time.sleep(0.005)


def attached(source: DraftSource) -> DraftTransport:
    until(lambda: source.transport is not None)
    transport = source.transport
    assert transport is not None
    return transport


@contextmanager
def client_of(address: str, kind: Kind) -> Iterator[DrafterClient]:
    assert kind != "in-process"
    endpoint = DrafterEndpoint(name="mirror", address=address, transport=kind)
    client = DrafterClient(endpoint, TARGET, EPOCH, token_capacity=TOKEN_CAPACITY)
    client.start()
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(name="process", scope="module")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrafterProcess]:
    process = DrafterProcess(tmp_path_factory.mktemp("drafter"))
    yield process
    process.kill()


@pytest.fixture(name="source", params=KINDS)
def _source(request: pytest.FixtureRequest, process: DrafterProcess) -> Iterator[DraftSource]:
    if request.param == "in-process":
        source = InProcessClient("mirror", MirrorDrafter(), TARGET, EPOCH)
        source.start()
        yield source
        source.close()
    else:
        with client_of(process.address, request.param) as client:
            yield client


@pytest.fixture(name="client", params=PROCESS_KINDS)
def _client(request: pytest.FixtureRequest, process: DrafterProcess) -> Iterator[DrafterClient]:
    with client_of(process.address, request.param) as client:
        yield client


def assert_same_batch(got: DraftBatch | None, expected: DraftBatch) -> None:
    assert got is not None
    assert (got.epoch, got.step_id) == (expected.epoch, expected.step_id)
    for name in ("node_starts", "tokens", "parents"):
        assert getattr(got, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


def test_attached_source_says_what_it_is(source: DraftSource, request: pytest.FixtureRequest) -> None:
    transport = attached(source)
    assert transport.name == source.transport_name == request.node.callspec.params["source"]
    assert (source.name, source.algorithm, source.state) == ("mirror", "MIRROR", "attached")
    assert (source.num_attaches, source.num_rejected) == (1, 0)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=draft_requests())
def test_every_column_arrives_and_every_tree_comes_back(source: DraftSource, request: DraftRequest) -> None:
    """Requests beyond the capacity arrive in parts."""
    request = with_epoch(request)
    transport = attached(source)
    transport.release(range(TARGET.max_batch_slots))
    transport.post(request)
    assert_same_batch(transport.receive(LONG_S), MirrorDrafter().draft(request))
    assert source.num_rejected == 0


def with_epoch(request: DraftRequest) -> DraftRequest:
    return replace(request, epoch=EPOCH)


def test_tokens_add_up_over_requests_and_are_forgotten_by_release_and_generation(source: DraftSource) -> None:
    transport = attached(source)

    def digest(tokens: list[int], step_id: int, **columns: Any) -> int:
        transport.post(draft_request([tokens], epoch=EPOCH, step_id=step_id, **columns))
        batch = transport.receive(LONG_S)
        assert batch is not None
        return int(batch.tree(0).tokens[1])

    transport.release([0])
    assert digest([5, 7], 1) == 5 + 2 * 7
    assert digest([9], 2, lengths=[3]) == 5 + 2 * 7 + 3 * 9
    assert digest([4], 3, generations=[2]) == 4
    transport.release([0])
    assert digest([6], 4, generations=[2], lengths=[2]) == 6


def test_a_source_that_is_closed_is_of_no_more_use(source: DraftSource) -> None:
    transport = attached(source)
    assert transport.is_open()
    transport.close()
    transport.close()
    assert not transport.is_open()
    with pytest.raises(TransportClosedError):
        transport.post(draft_request([[5]], epoch=EPOCH))
    with pytest.raises(TransportClosedError):
        transport.receive(LONG_S)
    with pytest.raises(TransportClosedError):
        transport.release([0])
    source.close()
    source.close()


def test_what_the_drafter_raises_ends_the_attachment_and_it_comes_back(source: DraftSource) -> None:
    transport = attached(source)
    try:
        transport.post(draft_request([[5]], epoch=EPOCH, salts=[POISON_SALT]))
        with pytest.raises(TransportClosedError):
            transport.receive(LONG_S)
    except TransportClosedError as error:
        source.report_failure(str(error))
    again = attached_again(source, 2)
    again.post(draft_request([[5]], epoch=EPOCH))
    assert again.receive(LONG_S) is not None


def attached_again(source: DraftSource, num_attaches: int) -> DraftTransport:
    until(lambda: source.transport is not None and source.num_attaches >= num_attaches)
    assert (source.state, source.reason) == ("attached", "")
    return attached(source)


def test_failures_in_a_row_detach_and_the_drafter_comes_back(source: DraftSource) -> None:
    attached(source)
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        source.report_failure("too late")
    source.report_success()
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        source.report_failure("too late")
    assert source.transport is not None and source.num_attaches == 1
    source.report_failure("too late")
    attached_again(source, 2)


def test_a_late_draft_is_none_and_the_next_one_comes(client: DrafterClient, process: DrafterProcess) -> None:
    transport = attached(client)
    process.stop()
    transport.post(draft_request([[5]], epoch=EPOCH, step_id=1))
    assert transport.receive(SHORT_S) is None
    assert client.num_rejected == 1
    process.resume()
    request = draft_request([[6]], epoch=EPOCH, step_id=2, lengths=[2])
    transport.post(request)
    batch = transport.receive(LONG_S)
    assert batch is not None and batch.step_id == 2
    # The late request was learnt from.
    assert batch.tree(0).tokens.tolist()[1] == 5 + 2 * 6
    assert (client.num_rejected, client.num_attaches) == (1, 1)


def test_a_stopped_drafter_cannot_make_the_engine_wait_or_grow(client: DrafterClient, process: DrafterProcess) -> None:
    transport = attached(client)
    process.stop()
    for step_id in range(1, 40):
        transport.post(draft_request([[step_id]], epoch=EPOCH, step_id=step_id, lengths=[step_id]))
    assert transport.receive(0.0) is None
    process.resume()
    transport.post(draft_request([[40]], epoch=EPOCH, step_id=40, lengths=[40]))
    batch = transport.receive(LONG_S)
    assert batch is not None and batch.step_id == 40
    assert batch.tree(0).tokens.tolist()[1] == sum((place + 1) * (place + 1) for place in range(40))


@pytest.mark.parametrize("kind", ["shared-memory", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_killed_drafter_is_noticed_at_once_and_attached_again(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = DrafterProcess(tmp_path)
    with client_of(process.address, kind) as client:
        transport = attached(client)
        process.stop()
        transport.post(draft_request([[5]], epoch=EPOCH))
        killer = threading.Timer(SHORT_S, process.kill)
        assert transport.is_open(), "it only stands still"
        killer.start()
        # Something other than the time-out ends this.
        with pytest.raises(TransportClosedError):
            transport.receive(LONG_S)
        killer.join()
        assert not transport.is_open()
        until(lambda: client.transport is None)
        assert client.state == "connecting"
        process.start()
        again = attached_again(client, 2)
        again.post(draft_request([[6]], epoch=EPOCH, step_id=2))
        assert again.receive(LONG_S) is not None
    process.kill()
    events = [record.getMessage() for record in caplog.records if record.name == "verifier_svc.drafters.remote"]
    assert events.count(f"drafter mirror (MIRROR) attached over {kind}") == 2
    lost = [event for event in events if "is gone" in event]
    assert len(lost) == 1 and f"not attached over {kind}" in lost[0]
    # Others may draft meanwhile.
    assert lost[0].endswith("the drafter is gone; no drafts from it until it is")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_drafter_that_is_restarted_in_a_loop_is_attached_in_the_end(kind: Kind, tmp_path: Path) -> None:
    """It dies while it starts, while it is being attached, and in use."""
    process = DrafterProcess(tmp_path)
    with client_of(process.address, kind) as client:
        attached(client)
        for lives_until in ("start", "socket", "attached", "start", "used"):
            process.kill()
            before = client.num_attaches
            process.start()
            if lives_until == "socket":
                process.info()
            elif lives_until in ("attached", "used"):
                transport = attached_again(client, before + 1)
                if lives_until == "used":
                    transport.post(draft_request([[5]], epoch=EPOCH))
                    assert transport.receive(LONG_S) is not None
        process.kill()
        before = client.num_attaches
        process.start()
        transport = attached_again(client, before + 1)
        transport.post(draft_request([[6]], epoch=EPOCH, step_id=2))
        assert transport.receive(LONG_S) is not None
    process.kill()


@pytest.mark.parametrize(("starts_within_s", "level"), [(LONG_S, logging.INFO), (0.0, logging.WARNING)])
def test_a_drafter_that_is_not_there_yet_is_a_warning_after_a_while(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    starts_within_s: float,
    level: int,
) -> None:
    monkeypatch.setattr(drafter_client, "STARTS_WITHIN_S", starts_within_s)
    caplog.set_level(logging.DEBUG, logger="verifier_svc.drafters.remote")

    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if record.name == "verifier_svc.drafters.remote"]

    with client_of(f"unix:{tmp_path}/nobody", "shared-memory"):
        until(lambda: len(levels()) >= 3)
    assert levels()[0] == level
    assert set(levels()[1:]) == {logging.DEBUG}


def test_an_idle_drafters_death_is_noticed_too(tmp_path: Path) -> None:
    process = DrafterProcess(tmp_path)
    with client_of(process.address, "shared-memory") as arena:
        attached(arena)
        process.kill()
        until(lambda: arena.transport is None and arena.state == "connecting")
        assert arena.reason


VERIFIER = """
import sys
from foretoken.drafting import TargetInfo
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.remote import DrafterClient
from tests.support.draft_requests import draft_request
client = DrafterClient(
    DrafterEndpoint(name="mirror", address=sys.argv[1], transport=sys.argv[2]), TargetInfo("m", 1000, 1024, 6, 16), 11
)
client.start()
while client.transport is None:
    pass
client.transport.post(draft_request([[5]], epoch=11))
assert client.transport.receive(600) is not None
print("drafted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["shared-memory", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_killed_verifier_frees_the_drafter(kind: Kind, process: DrafterProcess) -> None:
    command = [sys.executable, "-c", VERIFIER, process.address, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()) as verifier:
        assert verifier.stdout is not None
        assert verifier.stdout.readline() == b"drafted\n"
        info = process.info()
        assert (info.attached, info.transport, info.gauges["slots"]) == (True, kind, 1)
        verifier.kill()
    until(lambda: not process.info().attached)
    assert process.info().gauges["slots"] == 0


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_nothing_stays_open_or_running(kind: Kind, process: DrafterProcess) -> None:
    def attach_once() -> None:
        with client_of(process.address, kind) as client:
            transport = attached(client)
            transport.post(draft_request([[5]], epoch=EPOCH))
            assert transport.receive(LONG_S) is not None

    def num_open() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    attach_once()
    descriptors, threads = num_open()
    for _ in range(4):
        attach_once()
    # gRPC closes its sockets and ends its threads after a channel has closed.
    until(lambda: num_open()[0] <= descriptors and num_open()[1] <= threads)
    folder = Path(process.address.removeprefix("unix:")).parent
    assert [path.name for path in folder.iterdir()] == ["d.sock"]


class LyingDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """A service that fails the verifier in the way that its test sets."""

    def __init__(self) -> None:
        self.digest = b""
        self.transport = "grpc"
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.answer: Callable[[drafter_pb2.DraftRequest], drafter_pb2.DraftResponse] = probe_answer
        self.targets: list[TargetInfo] = []

    def Prepare(self, request: drafter_pb2.PrepareRequest, context: Any) -> drafter_pb2.PrepareResponse:
        return drafter_pb2.PrepareResponse(algorithm="LIAR")

    def Attach(self, request: drafter_pb2.AttachRequest, context: Any) -> drafter_pb2.AttachResponse:
        self.targets.append(target_from_proto(request.target))
        if self.refusal is not None:
            context.abort(*self.refusal)
        digest = self.digest or hashlib.sha256(request.challenge).digest()
        return drafter_pb2.AttachResponse(
            name="liar", algorithm="LIAR", challenge_digest=digest, transport=self.transport
        )

    def Draft(self, requests: Iterator[drafter_pb2.DraftRequest], context: Any) -> Iterator[drafter_pb2.DraftResponse]:
        for request in requests:
            yield self.answer(request) if request.slots else probe_answer(request)


def probe_answer(request: drafter_pb2.DraftRequest) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(epoch=request.epoch, step_id=request.step_id, node_starts=[0])


@pytest.fixture(name="liar")
def _liar(tmp_path: Path) -> Iterator[tuple[LyingDrafter, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    liar = LyingDrafter()
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(liar, server)
    address = f"unix:{tmp_path}/liar.sock"
    server.add_insecure_port(address)
    server.start()
    yield liar, address
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("kind", "lie", "reason"),
    [
        ("grpc", {"digest": b"0" * 32}, "did not get the challenge over grpc"),
        ("grpc", {"transport": "shared-memory"}, "the drafter uses 'shared-memory', not 'grpc'"),
        ("grpc", {"refusal": (grpc.StatusCode.FAILED_PRECONDITION, "layout version 9, this drafter has 2")}, "version"),
        # The digest is right but never went through the arena.
        ("shared-memory", {"transport": "shared-memory"}, "the digest in the arena is not that of the challenge"),
    ],
)
def test_a_drafter_that_fails_its_self_test_is_refused_loudly(
    liar: tuple[LyingDrafter, str], kind: Kind, lie: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, address = liar
    for name, value in lie.items():
        setattr(drafter, name, value)
    with client_of(address, kind) as client:
        until(lambda: len(drafter.targets) >= 3)
        assert (client.state, client.transport, client.num_attaches) == ("broken", None, 0)
        assert reason in client.reason
        assert client.transport_name == kind
    assert drafter.targets[0] == TARGET
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if reason in text and f"over {kind}" in text]) == 1


def test_only_an_unreachable_drafter_is_looked_for_often(
    liar: tuple[LyingDrafter, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that answers and then is unavailable each time is not."""
    asked: list[bool] = []
    next_backoff_s = CircuitBreaker.next_backoff_s

    def noted(breaker: CircuitBreaker, *, is_absent: bool = False) -> float:
        asked.append(is_absent)
        return next_backoff_s(breaker, is_absent=is_absent)

    monkeypatch.setattr(CircuitBreaker, "next_backoff_s", noted)
    drafter, address = liar
    drafter.refusal = grpc.StatusCode.UNAVAILABLE, "the drafter failed"
    for where, is_absent in ((address, False), (f"unix:{tmp_path}/nobody", True)):
        with client_of(where, "grpc"):
            until(lambda: len(asked) >= 3)
        assert set(asked) == {is_absent}
        asked.clear()


@pytest.mark.parametrize(
    "fields",
    [
        {"node_starts": [0, 2], "tokens": [1, 2], "parents": [0]},
        {"node_starts": [0, 99], "tokens": [1], "parents": [0]},
        {"node_starts": [0], "tokens": [], "parents": []},
        {"node_starts": [], "tokens": [], "parents": []},
        {"node_starts": [0, 2**32 - 1], "tokens": [1], "parents": [0]},
        {"node_starts": [0, 5], "tokens": [1] * 5, "parents": [0] * 5},
        {"node_starts": [0, 1], "tokens": [2**31], "parents": [0]},
        {"node_starts": [0, 1], "tokens": [1], "parents": [-1], "scores": []},
        {"node_starts": [0, 1], "tokens": [1], "parents": [-1], "step_id": 99},
        {"node_starts": [0, 1], "tokens": [1], "parents": [-1], "epoch": 99},
    ],
)
def test_a_malformed_reply_is_no_reply_and_the_stream_goes_on(
    liar: tuple[LyingDrafter, str], fields: dict[str, Any]
) -> None:
    drafter, address = liar
    with client_of(address, "grpc") as client:
        transport = attached(client)
        drafter.answer = lambda request: drafter_pb2.DraftResponse(
            **({"epoch": request.epoch, "step_id": request.step_id, "scores": [0] * len(fields["tokens"])} | fields)
        )
        transport.post(draft_request([[5]], epoch=EPOCH, step_id=1))
        assert transport.receive(LONG_S) is None
        assert client.num_rejected == 1
        drafter.answer = lambda request: drafter_pb2.DraftResponse(
            epoch=request.epoch, step_id=request.step_id, node_starts=[0, 1], tokens=[6], parents=[-1], scores=[0]
        )
        transport.post(draft_request([[6]], epoch=EPOCH, step_id=2))
        batch = transport.receive(LONG_S)
        assert batch is not None and batch.tokens.tolist() == [6]


def test_a_client_of_nobody_closes_at_once(tmp_path: Path) -> None:
    with client_of(f"unix:{tmp_path}/nobody.sock", "shared-memory") as client:
        assert (client.state, client.transport) == ("connecting", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "transport", "expected"),
    [
        ("unix:/run/d.sock", "auto", "shared-memory"),
        ("10.0.0.1:7000", "auto", "grpc"),
        ("unix:/run/d.sock", "grpc", "grpc"),
        ("127.0.0.1:7000", "shared-memory", "shared-memory"),
    ],
)
def test_transport_by_endpoint(address: str, transport: Any, expected: str) -> None:
    endpoint = DrafterEndpoint(name="d", address=address, transport=transport)
    assert DrafterClient(endpoint, TARGET, EPOCH).transport_name == expected


def test_gauges_are_looked_at_in_the_background_and_gone_with_the_attachment(
    client: DrafterClient, process: DrafterProcess
) -> None:
    transport = attached(client)
    until(lambda: "requests" in client.gauges)
    process.stop()
    # The drafter is silent. Giving it up meanwhile does not wait for its gauges.
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        client.report_failure("late")
    until(lambda: client.gauges == {})
    assert client.state == "broken"
    process.resume()
    assert attached(client) is not transport
    until(lambda: "requests" in client.gauges)
