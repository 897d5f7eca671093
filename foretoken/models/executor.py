"""What runs a model's programs: the CPU's compiled passes, or a GPU's."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention
from foretoken.models.forward_pass import ForwardPass
from foretoken.models.program import Program


class Executor(Protocol):
    """One model's buffers, and programs over them. Not for two threads at once."""

    def load(self, program: Program) -> Any:
        """A program in the form that ``run`` takes."""
        ...

    def run(self, loaded: Any, batch: ForwardBatch, given: NDArray[np.float32] | None = None) -> None:
        """Run it. Raises ValueError for a batch that it cannot run; nothing was written."""
        ...

    def buffer(self, field: int, rows: int, width: int) -> torch.Tensor:
        """[rows, width]: a buffer after a run; a view that is valid until the next one."""
        ...


def make_executor(
    config: ModelConfig,
    cache: KVCache,
    vocab_size: int,
    num_positions: int,
    num_threads: int = 1,
    wide_threads: int = 0,
    sizes: PassSizes | None = None,
    strict: bool = False,
    flashinfer: FlashInferAttention | None = None,
) -> Executor:
    """A GPU's where ``sizes`` are given, else the CPU's. Other arguments as ForwardPass; ``strict`` and ``flashinfer``
    as DevicePass: the CPU's passes are strict."""
    if sizes is None:
        return ForwardPass(config, cache, vocab_size, num_positions, num_threads, wide_threads)
    # Triton is imported where there is a GPU alone.
    from foretoken.models.device_pass import DevicePass

    return DevicePass(config, cache, num_positions, sizes, strict, flashinfer)
