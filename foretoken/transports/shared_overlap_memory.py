"""Device memory that two processes on one device share, and the order between their streams.

It consists of two descriptors: the device memory and the flag words. On a CPU, where Triton's
interpreter runs the GPU kernels, both are plain shared memory, and an ``await`` blocks the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import torch

from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.transports.arena_layout import SIZE_SEALS, map_memory, new_memory, seal
from foretoken.transports.cuda_memory import CudaMemory
from foretoken.transports.flag_words import EVERY_STEP, FLAG_BYTES, CudaOrder, FlagWords, HostOrder


class SharedOverlapMemory:
    """One side's mapping.

    A tensor of ``memory`` keeps the mapping alive, ``order`` keeps the flag words alive.

    So queued work may use both after the other side is gone and another thread has closed the
    transport. Nothing is unmapped before its last user has released it and its streams are idle.
    """

    def __init__(self, layout: OverlapLayout, raw: torch.Tensor, order: StreamOrder) -> None:
        """``raw``: the memory, uint8 [layout.num_bytes]."""
        self._raw = raw
        self.memory = OverlapMemory.over(raw, layout)
        self.order = order

    @staticmethod
    def new(layout: OverlapLayout, device: torch.device) -> tuple[SharedOverlapMemory, list[int]]:
        """Make zeroed memory; return it and the descriptors to hand over, which the caller closes.

        Raises UnavailableError or PreconditionError with the name of CUDA's error.
        """
        with contextlib.ExitStack() as undo:
            flags_fd = new_memory("foretoken-flags", FLAG_BYTES)
            undo.callback(os.close, flags_fd)
            seal(flags_fd, SIZE_SEALS)
            words = FlagWords(map_memory(flags_fd, FLAG_BYTES, writable=True))
            if device.type == "cpu":
                memory_fd = new_memory("foretoken-overlap", layout.num_bytes)
                undo.callback(os.close, memory_fd)
                seal(memory_fd, SIZE_SEALS)
                share = SharedOverlapMemory(layout, _map_host(memory_fd, layout.num_bytes), HostOrder(words))
            else:
                order = CudaOrder(words, device)
                memory = CudaMemory(device, layout.num_bytes, drain=order.drain)
                memory_fd = memory.export()
                undo.callback(os.close, memory_fd)
                share = SharedOverlapMemory(layout, memory.tensor(), order)
                with _beside_all_work(device):
                    share._raw.zero_()
            undo.pop_all()
        return share, [memory_fd, flags_fd]

    @staticmethod
    def mapped(layout: OverlapLayout, device: torch.device, fds: list[int]) -> SharedOverlapMemory:
        """Map memory that another process made with ``new``.

        The caller closes the descriptors ``fds``.

        Raises UnavailableError or PreconditionError with the name of CUDA's error.
        """
        memory_fd, flags_fd = fds
        words = FlagWords(map_memory(flags_fd, FLAG_BYTES, writable=True))
        if device.type == "cpu":
            return SharedOverlapMemory(layout, _map_host(memory_fd, layout.num_bytes), HostOrder(words))
        order = CudaOrder(words, device)
        memory = CudaMemory(device, layout.num_bytes, drain=order.drain, fd=memory_fd)
        return SharedOverlapMemory(layout, memory.tensor(), order)

    def write_proof(self, proof: bytes) -> None:
        """Write the bytes of a self-test for the other side; they are in the memory on return."""
        with _beside_all_work(self._raw.device):
            self._raw[: len(proof)].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))

    def take_proof(self, size: int) -> bytes:
        """Return the bytes of a self-test and set them to zero."""
        with _beside_all_work(self._raw.device):
            proof = bytes(self._raw[:size].tolist())
            self._raw[:size].zero_()
        return proof

    def release(self) -> None:
        """Let both sides' streams continue. Any thread may call it; nothing is unmapped."""
        self.order.release_step(EVERY_STEP)
        self.order.release_draft(EVERY_STEP)


@contextlib.contextmanager
def _beside_all_work(device: torch.device) -> Iterator[None]:
    """Run the block's GPU work at once and wait for it.

    It stays apart from other threads, which may capture graphs.
    """
    if device.type == "cpu":
        yield
        return
    # Graphs are captured on streams of normal priority, which PyTorch hands out repeatedly.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _map_host(fd: int, num_bytes: int) -> torch.Tensor:
    """Map memory as a tensor uint8 [num_bytes], which keeps the mapping alive."""
    memory: mmap.mmap = map_memory(fd, num_bytes, writable=True)
    return torch.frombuffer(memory, dtype=torch.uint8)
