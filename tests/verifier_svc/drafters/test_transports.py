"""One suite over all transports.

Arena and stream run against a drafter in a process of its own; the third runs in this process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.transports.transport import TransportClosedError
from tests.support.draft_requests import draft_request, draft_requests
from tests.support.drafter_process import (
    EPOCH,
    LONG_S,
    PROCESS_KINDS,
    SHORT_S,
    TARGET,
    DrafterProcess,
    Kind,
    attached,
    attached_again,
    client_of,
    until,
)
from tests.support.mirror_drafter import POISON_SALT, MirrorDrafter
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES, DraftSource


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
    # The late request was learned from.
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
