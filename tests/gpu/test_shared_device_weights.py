"""Another process maps a target's embedding and head in GPU memory, read-only.

It reads the same memory and cannot write to it; mapping costs no memory, and all of it comes back.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.models.backend import Backend, device_of, device_uuid
from foretoken.models.draft_weights import head_rows
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import RowLayout
from foretoken.transports.shared_weights import SharedWeights, map_weights
from tests.support.environment import child_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40)]

ROWS, SIZE = 32768, 2048
NUM_BYTES = 2 * ROWS * SIZE
IDS = np.array([ROWS - 1, 0, 4711], np.int32)
# The driver's own memory, and fragments.
SLACK = 8 << 20


def weights(device: torch.device, *, tied: bool = False) -> TargetWeights:
    """Make weights: head row i is i modulo 251, embedding row i one more, exact in bfloat16."""
    layout = RowLayout(device, torch.bfloat16)
    head = (torch.arange(ROWS, device=device) % 251).to(torch.bfloat16)[:, None].expand(ROWS, SIZE).contiguous()
    return TargetWeights(ROWS, SIZE, tied, layout, head if tied else head + 1, head)


@pytest.fixture(name="backend", scope="module")
def _backend() -> Backend:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    return Backend("gpu", device)


def num_free(device: torch.device) -> int:
    """Return the device's free bytes, after this process's freed memory has gone back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def peer() -> None:
    """Run a drafter's process: it reads, reads the owner's changes, and cannot write."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        uuid = sys.argv[2]
        _, fds, _, _ = socket.recv_fds(connection, 1, 2)
        mapped = map_weights((fds[0], fds[1]), uuid)
        expected = weights(device_of(uuid))
        assert mapped.layout == expected.layout and not mapped.tied
        is_same = torch.equal(mapped.head, expected.head) and torch.equal(mapped.embedding, expected.embedding)
        # As a kernel reads them: a product with the head, and rows that are copied.
        product = mapped.embedding[7:8].float() @ mapped.head[:64].float().T
        is_same &= torch.equal(product, expected.embedding[7:8].float() @ expected.head[:64].float().T)
        rows = head_rows(mapped, IDS)
        is_same &= torch.equal(rows, expected.head[torch.from_numpy(IDS).to(rows.device)])
        connection.send(b"same" if is_same else b"another")
        assert connection.recv(16) == b"changed"
        connection.send(b"seen" if bool(mapped.head[5].eq(-2).all()) and not bool(rows.eq(-2).any()) else b"unseen")
        assert connection.recv(16) == b"write"
        try:
            mapped.head.fill_(3.0)
            torch.cuda.synchronize()
        except RuntimeError as error:
            connection.send(f"refused: {error}".encode()[:200])
        else:
            connection.send(b"written")
        # This process's context is lost, and nothing needs it.
        os._exit(0)


@contextmanager
def peer_process(uuid: str, folder: Path) -> Iterator[socket.socket]:
    """Start the peer in its own context: ``folder`` has no MPS daemon, so faults stay its own."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    environment = child_environment() | {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    code = "from tests.gpu.test_shared_device_weights import peer; peer()"
    command = [sys.executable, "-c", code, str(theirs.fileno()), uuid]
    process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.wait()
        ours.close()


def test_another_process_reads_the_very_memory_and_cannot_write_to_it(backend: Backend, tmp_path: Path) -> None:
    shared = SharedWeights(weights(backend.device), backend)
    with peer_process(device_uuid(backend), tmp_path) as connection:
        socket.send_fds(connection, [b"\0"], shared.filenos())
        assert connection.recv(16) == b"same"
        shared.weights.head[5] = -2
        torch.cuda.synchronize()
        connection.send(b"changed")
        assert connection.recv(16) == b"seen"
        connection.send(b"write")
        assert connection.recv(256).startswith(b"refused")
    torch.cuda.synchronize()
    expected = weights(backend.device)
    expected.head[5] = -2
    assert torch.equal(shared.weights.head, expected.head)
    assert torch.equal(shared.weights.embedding, expected.embedding)
    shared.close()


@pytest.mark.parametrize("tied", [True, False])
def test_they_are_there_once_and_come_back_with_the_last_tensor(backend: Backend, tied: bool) -> None:
    num_bytes = NUM_BYTES if tied else 2 * NUM_BYTES
    before = num_free(backend.device)
    shared = SharedWeights(weights(backend.device, tied=tied), backend)
    once = num_free(backend.device)
    assert abs(before - num_bytes - once) <= SLACK
    mapped = map_weights(shared.filenos(), shared.device)
    assert num_free(backend.device) >= once - SLACK
    row = mapped.head[7]
    del shared, mapped
    assert num_free(backend.device) <= before - num_bytes + SLACK, "a tensor is left"
    assert row.eq(7).all()
    del row
    assert num_free(backend.device) >= before - SLACK


def test_what_was_launched_is_done_before_they_are_unmapped(backend: Backend) -> None:
    shared = SharedWeights(weights(backend.device, tied=True), backend)
    mapped = map_weights(shared.filenos(), shared.device)
    sums = torch.zeros(200, device=backend.device)
    for index in range(len(sums)):
        sums[index] = mapped.head[:256].sum(dtype=torch.float32)
    event = torch.cuda.Event()
    event.record()
    del mapped
    assert event.query(), "letting go waited for the device"
    assert sums.eq(shared.weights.head[:256].sum(dtype=torch.float32)).all()


def test_the_last_tensor_may_go_in_the_middle_of_a_capture(backend: Backend) -> None:
    """The garbage collector may free it at that moment."""
    shared = SharedWeights(weights(backend.device, tied=True), backend)
    mapped = map_weights(shared.filenos(), shared.device)
    total = mapped.head.sum(dtype=torch.float32)
    counted = torch.zeros(1, device=backend.device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        counted.add_(1)
        del mapped
        counted.add_(1)
        graph.capture_end()
    counted.zero_()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert counted.item() == 2 and total.item() == shared.weights.head.sum(dtype=torch.float32).item()
