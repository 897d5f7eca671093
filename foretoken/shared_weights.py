"""A target's embedding and output head in memory that drafters on the same host map, so that one copy serves all.

The memory is a sealed memfd: nobody can map it writable or change its size, and no name outlives its holders.

    header    magic, version, vocabulary, hidden size, tied, bfloat16, offset and bytes of embedding and head
    head      packed panels
    embedding rows, unless the two are tied
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import replace

import torch

from foretoken.arena_layout import F_SEAL_FUTURE_WRITE, SIZE_SEALS, new_memory, seal
from foretoken.errors import PreconditionError
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import PanelLayout

_HEADER = struct.Struct("<8sI4I4Q")
_MAGIC = b"FTWEIGHT"
_VERSION = 1


class SharedWeights:
    """The verifier's end: ``weights`` are views of the shared memory. The memory lives as long as they do."""

    def __init__(self, weights: TargetWeights) -> None:
        """Copies once; the caller drops its own."""
        head_at = mmap.PAGESIZE
        embedding_at = head_at + _pages(weights.head.nbytes)
        embedding_bytes = 0 if weights.tied else weights.embedding.nbytes
        size = embedding_at + _pages(embedding_bytes)
        self._fd = new_memory("foretoken-weights", size)
        self._memory = mmap.mmap(self._fd, size)
        self._memory[: _HEADER.size] = _HEADER.pack(
            _MAGIC,
            _VERSION,
            weights.vocab_size,
            weights.hidden_size,
            weights.tied,
            weights.bfloat16,
            head_at,
            weights.head.nbytes,
            embedding_at,
            embedding_bytes,
        )
        head = _view(self._memory, head_at, weights.head.nbytes, weights.head.dtype)
        head.copy_(weights.head)
        embedding = head
        if not weights.tied:
            embedding = _view(self._memory, embedding_at, embedding_bytes, weights.embedding.dtype)
            embedding.copy_(weights.embedding)
        seal(self._fd, F_SEAL_FUTURE_WRITE | SIZE_SEALS)
        self.weights = replace(weights, embedding=embedding, head=head)

    def fileno(self) -> int:
        """Descriptor to pass to a drafter."""
        return self._fd

    def close(self) -> None:
        """Give the descriptor back. Idempotent; mappings stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_weights(fd: int) -> TargetWeights:
    """A drafter's end: the weights that ``fd`` holds, mapped. Raises PreconditionError for other memory."""
    size = os.fstat(fd).st_size
    if size < mmap.PAGESIZE:
        raise PreconditionError(f"shared weights: memory of {size} bytes")
    # Private and never written: the pages are the verifier's. PyTorch warns of buffers that it may not write to.
    memory = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    magic, version, vocab_size, hidden_size, tied, bfloat16, head_at, head_bytes, embedding_at, embedding_bytes = (
        _HEADER.unpack_from(memory)
    )
    if (magic, version) != (_MAGIC, _VERSION):
        raise PreconditionError(f"shared weights: {magic!r} version {version}, this drafter has {_VERSION}")
    if max(head_at + head_bytes, embedding_at + embedding_bytes) > size:
        raise PreconditionError(f"shared weights: memory of {size} bytes is cut short")
    dtype = torch.uint16 if bfloat16 else torch.float32
    head = _view(memory, head_at, head_bytes, dtype)
    embedding = head if tied else _view(memory, embedding_at, embedding_bytes, dtype)
    return TargetWeights(vocab_size, hidden_size, bool(tied), PanelLayout(bool(bfloat16)), embedding, head)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _view(memory: mmap.mmap, offset: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset)
