"""A service that fails its verifier: at its self-test, at each attach, or by its replies."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken.drafting import TargetInfo
from foretoken.transports.draft_wire import target_from_proto
from protos import drafter_pb2, drafter_pb2_grpc
from tests.support.draft_requests import draft_request
from tests.support.drafter_process import EPOCH, LONG_S, TARGET, Kind, attached, client_of, until
from verifier_svc.drafters.source import CircuitBreaker


class LyingDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """A service that fails the verifier in the way that its test sets."""

    def __init__(self) -> None:
        self.digest = b""
        self.transport = "grpc"
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.answer: Callable[[drafter_pb2.DraftRequest], drafter_pb2.DraftResponse] = probe_answer
        self.targets: list[TargetInfo] = []
        # Until this is set, Attach goes on.
        self.is_compiled = threading.Event()
        self.is_compiled.set()

    def Prepare(self, request: drafter_pb2.PrepareRequest, context: Any) -> drafter_pb2.PrepareResponse:
        return drafter_pb2.PrepareResponse(algorithm="LIAR")

    def Attach(self, request: drafter_pb2.AttachRequest, context: Any) -> drafter_pb2.AttachResponse:
        self.targets.append(target_from_proto(request.target))
        self.is_compiled.wait()
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
    liar.is_compiled.set()
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("kind", "lie", "reason"),
    [
        ("grpc", {"digest": b"0" * 32}, "did not get the challenge over grpc"),
        ("grpc", {"transport": "shared-memory"}, "the drafter uses 'shared-memory', not 'grpc'"),
        ("grpc", {"refusal": (grpc.StatusCode.FAILED_PRECONDITION, "layout version 9, this drafter has 2")}, "version"),
        # The digest is right but never went through the arena.
        ("shared-memory", {"transport": "shared-memory"}, "the digest in the arena does not match the challenge"),
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


@pytest.mark.parametrize("digest", [b"", b"0" * 32])
def test_one_that_compiles_is_being_attached(liar: tuple[LyingDrafter, str], digest: bytes) -> None:
    """Readiness waits for it longer than for one that does not answer."""
    drafter, address = liar
    drafter.digest = digest
    drafter.is_compiled.clear()
    with client_of(address, "grpc") as client:
        until(lambda: bool(drafter.targets))
        assert client.is_attaching and client.num_attaches == 0
        drafter.is_compiled.set()
        until(lambda: not client.is_attaching)
        assert client.num_attaches == (not digest)


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
