"""Which attachments get device memory, in one process and across two, and steps through it."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from foretoken.drafting import DeviceStep, DrafterNeeds, TargetInfo
from foretoken.models.backend import CPU, Backend
from foretoken.overlap_memory import OverlapLayout, OverlapMemory
from foretoken.transports.transport import DraftTransport, TransportClosedError
from tests.support.draft_requests import draft_request
from tests.support.drafter_process import started
from tests.support.environment import child_environment
from tests.support.mirror_drafter import MirrorDrafter
from tests.support.overlap_drafter import DEVICE, NUM_DRAFTED, NUM_KINDS, OverlapDrafter
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.request import DEFAULT_STEPS, TreeBounds
from verifier_svc.drafters.source import TransportName

TARGET = TargetInfo("m", 1000, 1024, max_batch_slots=4, max_nodes=8, hidden_size=2, num_layers=4)
OFFER = DeviceOffer(torch.device("cpu"), DEVICE, tokens=5, hidden_dtype=torch.bfloat16, prompt_rows=6)
LAYOUT = OverlapLayout(batch_rows=4, tokens=5, nodes=8, hidden_width=2, hidden_dtype=torch.bfloat16, prompt_rows=6)
EPOCH = 11
LONG_S = 600.0


class Boastful(MirrorDrafter):
    """A drafter that names the device and takes no memory there."""

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds(device=DEVICE, overlaps=True)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


@contextmanager
def process_at(address: str, module: str = "tests.support.overlap_drafter") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, address], env=child_environment())
    yield process
    process.kill()
    process.wait()


@pytest.fixture(name="address", scope="module")
def _address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"unix:{tmp_path_factory.mktemp('drafter')}/d.sock"
    with process_at(address):
        yield address


def client_of(
    address: str, transport: TransportName = "shared-memory", offer: DeviceOffer | None = OFFER
) -> AbstractContextManager[DrafterClient]:
    assert transport != "in-process"
    endpoint = DrafterEndpoint(name="overlap", address=address, transport=transport)
    return started(DrafterClient(endpoint, TARGET, EPOCH, offer=offer))


def attached(client: DrafterClient) -> DraftTransport:
    until(lambda: client.transport is not None)
    transport = client.transport
    assert transport is not None
    return transport


def commit(memory: OverlapMemory, number: int, batch_rows: int) -> None:
    """Write the results of a step.

    Each row's last token is ``100 * number + batch_row``; its hidden state is two times the row.
    """
    for batch_row in range(batch_rows):
        count = 1 + (number + batch_row) % LAYOUT.tokens
        memory.counts[batch_row] = count
        memory.new_tokens[batch_row, count - 1] = 100 * number + batch_row
        memory.hidden[batch_row * LAYOUT.tokens + count - 1] = batch_row
    memory.stamp.fill_(number)


def expected_tree(number: int, batch_row: int) -> list[int]:
    return [100 * number + batch_row + node * 2 * batch_row for node in range(1 + NUM_DRAFTED)]


def run_steps(transport: DraftTransport, first: int, count: int) -> None:
    """Run over two batch rows; post each request before its step's results are there."""
    memory = transport.overlap_memory
    assert memory is not None and memory.layout == LAYOUT
    for number in range(first, first + count):
        is_last = number == first + count - 1
        step = DeviceStep(number, begins=number == first, is_last=is_last, num_batch_rows=2)
        transport.post(draft_request([[], []], epoch=EPOCH, step_id=number, device_step=step))
        commit(memory, number, 2)
        transport.order.signal_step(number)
        transport.order.await_draft(number)
        assert int(memory.draft_stamp) == number
        for batch_row in range(2):
            assert memory.draft_tokens[batch_row, : 1 + NUM_DRAFTED].tolist() == expected_tree(number, batch_row)
            assert int(memory.num_nodes[batch_row]) == 1 + NUM_DRAFTED
    batch = transport.receive(LONG_S)
    assert batch is not None
    for batch_row in range(2):
        assert batch.tree(batch_row).tokens.tolist() == expected_tree(first + count - 1, batch_row)


def test_steps_through_the_memory_of_a_drafters_process_and_plain_ones_between(address: str) -> None:
    with client_of(address) as client:
        transport = attached(client)
        assert client.needs.device == DEVICE
        run_steps(transport, 1, 20)
        transport.post(draft_request([[5, 7]], epoch=EPOCH, step_id=21))
        batch = transport.receive(LONG_S)
        assert batch is not None and batch.tree(0).tokens.tolist()[:2] == [7, 5 + 2 * 7]
        run_steps(transport, 22, 5)
        assert client.num_rejected == 0


def test_a_drafter_prepares_while_idle_and_says_when_it_is_done(address: str) -> None:
    with client_of(address) as client:
        attached(client)
        # Not before the drafter has said so.
        assert client.is_preparing or client.gauges["prepared"] == NUM_KINDS
        until(lambda: not client.is_preparing)
        assert client.gauges["prepared"] == NUM_KINDS
        run_steps(attached(client), 1, 3)
    with client_of(address, "grpc") as client:
        attached(client)
        assert not client.is_preparing


def test_a_later_attachment_has_memory_of_its_own(address: str) -> None:
    with client_of(address) as client:
        run_steps(attached(client), 7, 2)
    with client_of(address) as client:
        memory = attached(client).overlap_memory
        assert memory is not None and int(memory.stamp) == int(memory.draft_stamp) == 0
        run_steps(attached(client), 3, 2)


@pytest.mark.parametrize(
    ("transport", "offer"),
    [
        ("shared-memory", None),
        ("shared-memory", OFFER._replace(uuid="another GPU")),
        ("grpc", OFFER),
    ],
)
def test_without_one_device_and_one_host_there_is_none(
    address: str, transport: TransportName, offer: DeviceOffer | None
) -> None:
    with client_of(address, transport, offer) as client:
        there = attached(client)
        assert there.overlap_memory is None
        there.order.await_draft(99)
        assert (client.needs.device, client.needs.captured_layers) == ("" if transport == "grpc" else DEVICE, (1,))
        hidden = [[[0.0, 1.0]]]
        there.post(draft_request([[5]], epoch=EPOCH, hidden_width=2, hidden=hidden))
        assert there.receive(LONG_S) is not None


@pytest.mark.slow
def test_a_killed_drafter_leaves_the_memory_to_those_who_use_it_and_lets_them_go_on(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with client_of(address) as client:
        with process_at(address) as process:
            transport = attached(client)
            run_steps(transport, 1, 2)
            memory, order = transport.overlap_memory, transport.order
            assert memory is not None
            process.kill()
            process.wait()
            assert not transport.is_open()
        until(lambda: client.transport is None)
        # The client's own thread has closed the transport, or is closing it.
        order.await_draft(3)
        commit(memory, 3, 2)
        assert int(memory.stamp) == 3 and int(memory.draft_stamp) == 2
        with pytest.raises(TransportClosedError):
            transport.post(draft_request([[5]], epoch=EPOCH, step_id=3))
        with process_at(address):
            run_steps(attached(client), 4, 2)


BOASTFUL = """
import sys
import uvloop
from drafter_svc.config import DrafterSettings
from drafter_svc.server import serve
from tests.verifier_svc.drafters.test_device_offer import Boastful
uvloop.run(serve(DrafterSettings(name="boastful", address=sys.argv[1]), Boastful))
"""


def test_a_drafter_that_names_the_device_and_takes_no_memory_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/d.sock"
    with (
        subprocess.Popen([sys.executable, "-c", BOASTFUL, address], env=child_environment()) as process,
        client_of(address) as client,
    ):
        until(lambda: client.state == "broken")
        process.kill()
    assert client.num_attaches == 0
    inside = InProcessClient("boastful", Boastful(), TARGET, EPOCH, offer=OFFER)
    inside.start()
    assert (inside.state, inside.num_attaches) == ("broken", 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "of kind MIRROR does not draft from device memory" in text]) == 2


def test_a_drafter_in_the_process_gets_memory_after_its_attach() -> None:
    drafter = OverlapDrafter()
    client = InProcessClient("inside", drafter, TARGET, EPOCH, offer=OFFER)
    client.start()
    transport = client.transport
    assert transport is not None and transport.overlap_memory is not None
    assert drafter.memory is not None
    assert transport.overlap_memory.stamp.data_ptr() == drafter.memory.stamp.data_ptr()
    assert transport.overlap_memory.layout == LAYOUT and not transport.overlap_memory.hidden.any()
    memory = transport.overlap_memory
    for number in (1, 2):
        commit(memory, number, 2)
        step = DeviceStep(number, begins=number == 1, is_last=number == 2, num_batch_rows=2)
        transport.post(draft_request([[], []], epoch=EPOCH, step_id=number, device_step=step))
        assert memory.draft_tokens[1, : 1 + NUM_DRAFTED].tolist() == expected_tree(number, 1)
    batch = transport.receive(0)
    assert batch is not None and batch.tree(1).tokens.tolist() == expected_tree(2, 1)
    client.close()


@pytest.mark.parametrize(
    ("device", "offer"),
    [("", OFFER), ("another GPU", OFFER), (DEVICE, None)],
    ids=["no GPU", "another GPU", "no offer"],
)
def test_a_drafter_in_the_process_and_on_another_device_gets_none(device: str, offer: DeviceOffer | None) -> None:
    drafter = OverlapDrafter(device)
    client = InProcessClient("inside", drafter, TARGET, EPOCH, offer=offer)
    client.start()
    assert client.transport is not None and client.transport.overlap_memory is None and drafter.memory is None


def test_an_offer_is_of_gpu_kernels_and_as_large_as_the_deepest_tree() -> None:
    assert DeviceOffer.of_backend(CPU, 3, torch.float32, 6) is None
    backend = Backend("gpu", torch.device("cpu"))
    assert DeviceOffer.of_backend(backend, 4, torch.bfloat16, 6) == OFFER
    assert TreeBounds(max_nodes=32).max_depth == DEFAULT_STEPS
    assert TreeBounds(max_nodes=32, num_steps=9).max_depth == 9
    assert TreeBounds(max_nodes=4, num_steps=9).max_depth == 3
