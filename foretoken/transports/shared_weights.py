"""A target's embedding and output head in memory that drafters' processes map.

So one copy serves all.

It consists of two descriptors. Their holders cannot change the weights or the description:

    description  sealed memory: magic, version, sizes, layout, element type, device, offsets of the matrices
    weights      the head, then the embedding unless the two are tied; on the CPU a memfd, on a GPU memory of
                 CUDA's virtual memory management, which drafters map read-only
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import weakref
from functools import partial
from typing import NamedTuple

import torch

from foretoken.errors import PreconditionError
from foretoken.models.backend import CPU, Backend, device_of, device_uuid
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import PanelLayout, RowLayout
from foretoken.transports.arena_layout import F_SEAL_FUTURE_WRITE, SIZE_SEALS, new_memory, seal
from foretoken.transports.cuda_memory import CudaMemory

_MAGIC = b"FTWEIGHT"
_VERSION = 2
# Numbers of layouts and element types. Panels of bfloat16 and float16 are bits
# (foretoken.models.weight_layout).
_PANELS, _ROWS = 1, 2
_DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16, 4: torch.uint16, 5: torch.int16}
_DESCRIPTION = struct.Struct("<8sI5I4Q64s")
# Both matrices begin at a multiple of this.
_ALIGNMENT = mmap.PAGESIZE


class _Description(NamedTuple):
    """What the memory holds.

    Attributes:
        layout, dtype: numbers, as above.
        num_bytes: size of the memory, which begins with the head.
        embedding_at, embedding_bytes: equal to the head's if the two are tied.
        device: as foretoken.models.backend.device_uuid.
    """

    vocab_size: int
    hidden_size: int
    tied: int
    layout: int
    dtype: int
    num_bytes: int
    head_bytes: int
    embedding_at: int
    embedding_bytes: int
    device: str

    @staticmethod
    def of(weights: TargetWeights, device: str) -> _Description:
        head_bytes = weights.head.nbytes
        embedding_at = 0 if weights.tied else -(-head_bytes // _ALIGNMENT) * _ALIGNMENT
        numbers = {dtype: number for number, dtype in _DTYPES.items()}
        return _Description(
            weights.vocab_size,
            weights.hidden_size,
            weights.tied,
            _ROWS if isinstance(weights.layout, RowLayout) else _PANELS,
            numbers[weights.head.dtype],
            max(head_bytes, embedding_at + weights.embedding.nbytes),
            head_bytes,
            embedding_at,
            weights.embedding.nbytes,
            device,
        )

    def seal(self) -> int:
        """Return the descriptor of sealed memory that holds this description."""
        fd = new_memory("foretoken-weights-description", _DESCRIPTION.size)
        os.pwrite(fd, _DESCRIPTION.pack(_MAGIC, _VERSION, *self[:-1], self.device.encode()), 0)
        seal(fd, fcntl.F_SEAL_WRITE | SIZE_SEALS)
        return fd

    @staticmethod
    def read(fd: int) -> _Description:
        """Read a description.

        Raises PreconditionError for other memory, or if its weights do not fit in it.
        """
        data = os.pread(fd, _DESCRIPTION.size, 0)
        if len(data) < _DESCRIPTION.size:
            raise PreconditionError(f"shared weights: a description of {len(data)} bytes")
        magic, version, *values, device = _DESCRIPTION.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise PreconditionError(f"shared weights: {magic!r} version {version}, this drafter has {_VERSION}")
        description = _Description._make([*values, device.rstrip(b"\0").decode(errors="replace")])
        description._check()
        return description

    def views(self, memory: torch.Tensor) -> TargetWeights:
        """Return the weights as views of ``memory``, uint8 [num_bytes]."""
        dtype = _DTYPES[self.dtype]
        layout = RowLayout(memory.device, dtype) if self.layout == _ROWS else PanelLayout.holding(dtype)
        shape = (self.vocab_size, self.hidden_size) if self.layout == _ROWS else (-1,)

        def view(offset: int, num_bytes: int) -> torch.Tensor:
            return memory[offset : offset + num_bytes].view(dtype).view(shape)

        head = view(0, self.head_bytes)
        embedding = head if self.tied else view(self.embedding_at, self.embedding_bytes)
        return TargetWeights(self.vocab_size, self.hidden_size, bool(self.tied), layout, embedding, head)

    def _check(self) -> None:
        if self.layout not in (_PANELS, _ROWS) or self.dtype not in _DTYPES:
            raise PreconditionError(f"shared weights: layout {self.layout} of type {self.dtype} is unknown here")
        itemsize = _DTYPES[self.dtype].itemsize
        least = math.prod((self.vocab_size, self.hidden_size, itemsize))
        for offset, num_bytes in ((0, self.head_bytes), (self.embedding_at, self.embedding_bytes)):
            is_whole = num_bytes == least if self.layout == _ROWS else num_bytes >= least and not num_bytes % itemsize
            if not is_whole or offset % _ALIGNMENT or offset + num_bytes > self.num_bytes:
                raise PreconditionError(
                    f"shared weights: {num_bytes} bytes at {offset} of {self.num_bytes} do not hold "
                    f"{self.vocab_size} rows of {self.hidden_size}"
                )


class SharedWeights:
    """The verifier's end of shared weights.

    Attributes:
        weights: views of the shared memory, which lives as long as they do.
        device: device of the drafters that can use it, as backend.device_uuid; empty: the CPU.
    """

    def __init__(self, weights: TargetWeights, backend: Backend = CPU) -> None:
        """Copy the weights to shared memory, for ``backend`` to read.

        The caller can then free its own.

        Raises PreconditionError if GPU memory cannot be shared, UnavailableError if none is left;
        both name CUDA's error.
        """
        self.device = device_uuid(backend)
        description = _Description.of(weights, self.device)
        with contextlib.ExitStack() as undo:
            description_fd = description.seal()
            undo.callback(os.close, description_fd)
            if backend.device.type == "cpu":
                memory_fd = new_memory("foretoken-weights", description.num_bytes)
                undo.callback(os.close, memory_fd)
                mapping = mmap.mmap(memory_fd, description.num_bytes)
                # This mapping is older than the seal, so it stays writable.
                seal(memory_fd, F_SEAL_FUTURE_WRITE | SIZE_SEALS)
                memory = torch.frombuffer(mapping, dtype=torch.uint8)
            else:
                allocation = CudaMemory(backend.device, description.num_bytes, drain=partial(_drain, backend.device))
                memory_fd = allocation.export()
                undo.callback(os.close, memory_fd)
                memory = allocation.tensor()
            self.weights = description.views(memory)
            self.weights.head.copy_(weights.head)
            if not weights.tied:
                self.weights.embedding.copy_(weights.embedding)
            if backend.device.type == "cuda":
                # Nothing else orders this copy before the reads of other processes.
                torch.cuda.synchronize(backend.device)
            undo.pop_all()
        self._fds = (description_fd, memory_fd)
        # A descriptor keeps the memory even when nobody maps it.
        self._close = weakref.finalize(self, _close_all, self._fds)

    def filenos(self) -> tuple[int, int]:
        """Return the descriptors to pass to a drafter."""
        assert self._close.alive, "before close"
        return self._fds

    def close(self) -> None:
        """Close the descriptors; mappings stay. Idempotent."""
        self._close()


def map_weights(fds: tuple[int, int], device: str) -> TargetWeights:
    """Map the weights of a verifier's SharedWeights. The caller closes the descriptors.

    They stay mapped until their last tensor is gone and the GPU work that uses them is done.

    Args:
        device: the drafter's device, as backend.device_uuid.

    Raises:
        PreconditionError: it is other memory, the weights are for another device, or CUDA cannot
            map them.
        UnavailableError: mapping failed; names CUDA's error.
    """
    description_fd, memory_fd = fds
    description = _Description.read(description_fd)
    if description.device != device:
        theirs, ours = (name or "the CPU" for name in (description.device, device))
        raise PreconditionError(f"shared weights: they are for {theirs}, this drafter runs on {ours}")
    where = device_of(device) if device else CPU.device
    if where.type == "cuda":
        allocation = CudaMemory(
            where, description.num_bytes, drain=partial(_drain, where), fd=memory_fd, read_only=True
        )
        return description.views(allocation.tensor())
    size = os.fstat(memory_fd).st_size
    if size != description.num_bytes:
        raise PreconditionError(f"shared weights: memory of {size} bytes instead of {description.num_bytes}")
    # PyTorch warns of read-only buffers. This private mapping is never written, so it shares the
    # verifier's memory.
    mapping = mmap.mmap(memory_fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return description.views(torch.frombuffer(mapping, dtype=torch.uint8))


def _drain(device: torch.device) -> None:
    """Wait until no GPU work can read weights whose last tensor is gone."""
    # Garbage may be collected during a capture. The device was idle when that began and must not be
    # queried now; the captured work reads other weights.
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def _close_all(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)
