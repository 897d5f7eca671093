"""Resident memory between two processes on one device: both sides' mappings of it, and the order between them.

Two descriptors make it: of the device memory, and of the page of flag words. On a CPU, where GPU kernels run in the
interpreter, both are plain shared memory, and an ``await`` holds up the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import torch

from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder
from foretoken.transports.arena_layout import SIZE_SEALS, map_memory, new_memory, seal
from foretoken.transports.cuda_memory import CudaMemory
from foretoken.transports.flag_words import EVERY_STEP, FLAG_BYTES, CudaOrder, FlagWords, HostOrder


class ResidentShare:
    """One side's hold. Whoever keeps a tensor of ``memory`` keeps the mapping, whoever keeps ``order`` the flag words.

    So either may be in use, also by work that is queued on a stream, when the other side has gone and the transport is
    closed by another thread: nothing is unmapped before the last user has let go and its streams are idle.
    """

    def __init__(self, layout: ResidentLayout, raw: torch.Tensor, order: StreamOrder) -> None:
        """``raw``: uint8 [layout.num_bytes], the memory itself."""
        self._raw = raw
        self.memory = ResidentMemory.over(raw, layout)
        self.order = order

    @staticmethod
    def new(layout: ResidentLayout, device: torch.device) -> tuple[ResidentShare, list[int]]:
        """New zeroed memory, and the descriptors to hand over, which are the caller's.

        Raises UnavailableError or PreconditionError with the name of CUDA's error.
        """
        with contextlib.ExitStack() as undo:
            flags_fd = new_memory("foretoken-flags", FLAG_BYTES)
            undo.callback(os.close, flags_fd)
            seal(flags_fd, SIZE_SEALS)
            words = FlagWords(map_memory(flags_fd, FLAG_BYTES, writable=True))
            if device.type == "cpu":
                memory_fd = new_memory("foretoken-resident", layout.num_bytes)
                undo.callback(os.close, memory_fd)
                seal(memory_fd, SIZE_SEALS)
                share = ResidentShare(layout, _map_host(memory_fd, layout.num_bytes), HostOrder(words))
            else:
                order = CudaOrder(words, device)
                memory = CudaMemory(device, layout.num_bytes, drain=order.drain)
                memory_fd = memory.export()
                undo.callback(os.close, memory_fd)
                share = ResidentShare(layout, memory.tensor(), order)
                with _beside_all_work(device):
                    share._raw.zero_()
            undo.pop_all()
        return share, [memory_fd, flags_fd]

    @staticmethod
    def mapped(layout: ResidentLayout, device: torch.device, fds: list[int]) -> ResidentShare:
        """The memory that another process made. ``fds``: as ``new`` gave them there; they stay the caller's.

        Raises UnavailableError or PreconditionError with the name of CUDA's error.
        """
        memory_fd, flags_fd = fds
        words = FlagWords(map_memory(flags_fd, FLAG_BYTES, writable=True))
        if device.type == "cpu":
            return ResidentShare(layout, _map_host(memory_fd, layout.num_bytes), HostOrder(words))
        order = CudaOrder(words, device)
        memory = CudaMemory(device, layout.num_bytes, drain=order.drain, fd=memory_fd)
        return ResidentShare(layout, memory.tensor(), order)

    def write_proof(self, proof: bytes) -> None:
        """Put the bytes of a self-test where the other side takes them; done on return."""
        with _beside_all_work(self._raw.device):
            self._raw[: len(proof)].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))

    def take_proof(self, size: int) -> bytes:
        """The bytes of a self-test; they are zero on return."""
        with _beside_all_work(self._raw.device):
            proof = bytes(self._raw[:size].tolist())
            self._raw[:size].zero_()
        return proof

    def release(self) -> None:
        """Let both sides' streams go on, whatever they wait for. From any thread; nothing is unmapped."""
        self.order.release_step(EVERY_STEP)
        self.order.release_draft(EVERY_STEP)


@contextlib.contextmanager
def _beside_all_work(device: torch.device) -> Iterator[None]:
    """The block's work is done behind it, and waits for none of other threads, which may be capturing graphs."""
    if device.type == "cpu":
        yield
        return
    # Graphs are captured on streams of normal priority, which PyTorch gives out again and again.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _map_host(fd: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]; the tensor keeps the mapping."""
    memory: mmap.mmap = map_memory(fd, num_bytes, writable=True)
    return torch.frombuffer(memory, dtype=torch.uint8)
