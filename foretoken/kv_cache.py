"""The paged KV cache of one model. The block manager decides which sequence owns a block."""

from __future__ import annotations

import torch


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class KVCache:
    """Keys and values of ``num_blocks * block_size`` KV slots. Unwritten KV slots hold noise.

    Attributes:
        data: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; keys, then values.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """``device``: None: the CPU."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        # Passes that only have a size read the first block (foretoken.models.batch.blank_batch).
        self.data[:, :, :1] = 0

    def keys(self, layer: int) -> torch.Tensor:
        """Return a view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """Return a view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.data[layer, 1]

    @property
    def num_kv_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes
