"""Two processes on one GPU share device memory by descriptor and order their streams by flag words.

Each side replays a CUDA graph a round, and its host is rounds ahead. The device checks the data of
every round, both ways. Then the peer is stopped, or killed, while this process's stream waits for
it: this process's host releases the stream.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from foretoken.models.backend import Backend, device_of, device_uuid
from foretoken.overlap_memory import OverlapLayout, OverlapMemory
from foretoken.transports.shared_overlap_memory import SharedOverlapMemory
from tests.support.environment import child_environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40)]

LAYOUT = OverlapLayout(batch_rows=16, tokens=6, nodes=32, hidden_width=3 * 4096, hidden_dtype=torch.bfloat16)
ROUNDS = 200
# Rounds by which the hosts are ahead of the device.
AHEAD = 2
PROOF = bytes(range(1, 33))
# A stream goes on within a millisecond of its release; this only ends a test that hangs.
LONG_S = 10.0


class Work:
    """A side's graph: check the round's data of the other side, then a product, then write."""

    def __init__(self, memory: OverlapMemory, is_owner: bool) -> None:
        device = memory.stamp.device
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self._memory, self._is_owner = memory, is_owner
        self._x = torch.randn(8, 2048, dtype=torch.bfloat16, device=device)
        self._w = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
        self.write = self._captured(self._write)
        self.check = self._captured(self._check)
        for tensor in (self.number, self.num_wrong, *memory[1:]):
            tensor.zero_()
        torch.cuda.synchronize()

    def _write(self) -> None:
        self._x @ self._w
        self.number.add_(1)
        memory = self._memory
        if self._is_owner:
            memory.new_tokens.copy_(self.number.expand_as(memory.new_tokens))
            memory.hidden.copy_((self.number % 128).to(torch.bfloat16).expand_as(memory.hidden))
            memory.stamp.copy_(self.number)
        else:
            memory.draft_tokens.copy_((2 * self.number).expand_as(memory.draft_tokens))
            memory.draft_stamp.copy_(self.number)

    def _check(self) -> None:
        memory = self._memory
        if self._is_owner:
            # After its own write: the trees are of the same round.
            self.num_wrong.add_(
                (memory.draft_tokens != 2 * self.number).sum() + (memory.draft_stamp != self.number).sum()
            )
        else:
            now = self.number + 1
            self.num_wrong.add_((memory.new_tokens != now).sum() + (memory.stamp != now).sum())
            self.num_wrong.add_((memory.hidden != (now % 128).to(torch.bfloat16)).sum())

    @staticmethod
    def _captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launch()
            torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            launch()
            graph.capture_end()
        return graph


class Ahead:
    """Keeps the host at most AHEAD rounds before the device."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self._round = 0

    def step(self) -> None:
        self._events[self._round % len(self._events)].record()
        self._round += 1
        if self._round > AHEAD:
            # Not ``synchronize``: nothing could end a test after the other side is gone.
            assert goes_on(self._events[self._round % len(self._events)])

    def finish(self) -> None:
        assert goes_on(self._events[(self._round - 1) % len(self._events)])


def peer(connection: socket.socket) -> None:
    """Run the drafter's side in a process: map, prove, ROUNDS rounds, then wait for the end."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 2)
    uuid = sys.argv[2]
    torch.zeros(1, device=device_of(uuid))
    share = SharedOverlapMemory.mapped(LAYOUT, device_of(uuid), fds)
    for fd in fds:
        os.close(fd)
    assert share.take_proof(len(PROOF)) == PROOF
    work = Work(share.memory, is_owner=False)
    connection.send(b"mapped")
    assert connection.recv(16) == b"go"
    ahead = Ahead()
    for number in range(1, ROUNDS + 1):
        share.order.await_step(number)
        work.check.replay()
        work.write.replay()
        share.order.signal_draft(number)
        ahead.step()
    ahead.finish()
    connection.send(str(int(work.num_wrong)).encode())
    # A wait is still queued when the process ends, as in a drafter.
    share.order.await_step(ROUNDS + 1)
    connection.send(b"waiting")
    connection.recv(16)


@contextmanager
def peer_process(uuid: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    command = [
        sys.executable,
        "-c",
        "from tests.gpu.test_overlap_memory import main; main()",
        str(theirs.fileno()),
        uuid,
    ]
    process = subprocess.Popen(command, env=child_environment(), pass_fds=(theirs.fileno(),))
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        ours.close()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        peer(connection)


def goes_on(event: torch.cuda.Event) -> bool:
    deadline = time.monotonic() + LONG_S
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


@pytest.fixture(name="device", scope="module")
def _device() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    return device


def queue_wait(share: SharedOverlapMemory, number: int) -> torch.cuda.Event:
    """Let this side's stream wait for trees that never come; return an event after the wait."""
    event = torch.cuda.Event()
    share.order.await_draft(number)
    share.memory.counts.fill_(number)
    event.record()
    return event


def num_free(device: torch.device) -> int:
    """Return the device's free bytes, after this process's freed memory has gone back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def comes_back(device: torch.device, num_bytes: int, since: int) -> bool:
    """Return whether so many more bytes are free; a killed process's may take a moment."""
    deadline = time.monotonic() + LONG_S
    while torch.cuda.mem_get_info(device)[0] < since + num_bytes:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def rounds(share: SharedOverlapMemory, connection: socket.socket) -> None:
    """Run the verifier's side."""
    work = Work(share.memory, is_owner=True)
    connection.send(b"go")
    ahead = Ahead()
    began = time.perf_counter()
    for number in range(1, ROUNDS + 1):
        work.write.replay()
        share.order.signal_step(number)
        share.order.await_draft(number)
        work.check.replay()
        ahead.step()
    ahead.finish()
    print(f"{(time.perf_counter() - began) / ROUNDS * 1e6:.0f} us a round trip")
    assert int(work.num_wrong) == 0
    assert int(share.memory.draft_stamp) == ROUNDS
    assert connection.recv(1) == b"0", "what the peer found wrong"
    assert connection.recv(16) == b"waiting"


def test_rounds_between_two_processes_and_a_peer_that_stops_and_dies(device: torch.device) -> None:
    share, fds = SharedOverlapMemory.new(LAYOUT, device)
    try:
        with peer_process(device_uuid(Backend("gpu", device))) as (process, connection):
            assert not share._raw.any()
            share.write_proof(PROOF)
            socket.send_fds(connection, [b"\0"], fds)
            assert connection.recv(16) == b"mapped"
            assert share.take_proof(len(PROOF)) == bytes(len(PROOF))
            rounds(share, connection)

            process.send_signal(signal.SIGSTOP)
            event = queue_wait(share, ROUNDS + 1)
            time.sleep(0.2)
            assert not event.query(), "it waits for the peer"
            share.order.release_draft(ROUNDS + 1)
            assert goes_on(event)
            assert int(share.memory.counts[0]) == ROUNDS + 1 and int(share.memory.draft_stamp) == ROUNDS

            event = queue_wait(share, ROUNDS + 2)
            process.kill()
            process.wait()
            time.sleep(0.2)
            assert not event.query(), "it waits for the peer"
            share.order.release_draft(ROUNDS + 2)
            assert goes_on(event)
            assert int(share.memory.counts[0]) == ROUNDS + 2
        since = num_free(device)
    finally:
        # Also if the test fails: the process ends with its streams idle.
        share.release()
        for fd in fds:
            os.close(fd)
    del share
    assert comes_back(device, LAYOUT.num_bytes, since)


def test_the_last_tensor_keeps_the_memory_and_then_it_comes_back(device: torch.device) -> None:
    large = LAYOUT._replace(hidden_width=1 << 20)
    assert large.num_bytes > 128 << 20
    for _ in range(3):
        before = num_free(device)
        share, fds = SharedOverlapMemory.new(large, device)
        again = SharedOverlapMemory.mapped(large, device, fds)
        for fd in fds:
            os.close(fd)
        share.memory.hidden.fill_(3.0)
        # Memory is unmapped once the streams that it orders are idle, as this one is.
        share.order.signal_step(1)
        last = again.memory.hidden[7]
        del share, again
        assert num_free(device) <= before - large.num_bytes, "a tensor is left"
        assert last.eq(3.0).all()
        del last
        assert num_free(device) >= before - (4 << 20)


def test_the_last_user_may_free_the_memory_while_its_stream_waits(device: torch.device) -> None:
    """Only freeing the memory releases the stream here."""
    free = []
    for _ in range(3):
        share, fds = SharedOverlapMemory.new(LAYOUT, device)
        for fd in fds:
            os.close(fd)
        event = queue_wait(share, 1)
        assert not event.query()
        del share
        assert event.query()
        free.append(num_free(device))
    assert free[2] >= free[0]
