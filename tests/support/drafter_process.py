"""A mirror drafter in a process of its own, and clients that are attached to it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from foretoken import rpc
from foretoken.drafting import TargetInfo
from foretoken.transports.transport import DraftTransport
from protos import drafter_pb2, drafter_pb2_grpc
from tests.support.environment import child_environment
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import DraftSource

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


def attached_again(source: DraftSource, num_attaches: int) -> DraftTransport:
    until(lambda: source.transport is not None and source.num_attaches >= num_attaches)
    assert (source.state, source.reason) == ("attached", "")
    return attached(source)


@contextmanager
def started(client: DrafterClient) -> Iterator[DrafterClient]:
    """Start a client, and close it at the end of the block."""
    client.start()
    try:
        yield client
    finally:
        client.close()


def client_of(address: str, kind: Kind) -> AbstractContextManager[DrafterClient]:
    assert kind != "in-process"
    endpoint = DrafterEndpoint(name="mirror", address=address, transport=kind)
    return started(DrafterClient(endpoint, TARGET, EPOCH, token_capacity=TOKEN_CAPACITY))
