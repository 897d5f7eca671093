"""FlashInfer as the attention of a model's passes on a GPU.

The host plans it, so graphs cannot capture it.

Written for flashinfer-python 0.6.12, which is only imported if it is used.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.kv_cache import KVCache
from foretoken.models.attention_plan import PlannedRows, planned_rows
from foretoken.models.batch import ForwardBatch, chain_batch
from foretoken.models.config import ModelConfig
from foretoken.models.device_batch import Runs, runs_of

_log = logging.getLogger(__name__)

REQUIREMENT = "flashinfer-python>=0.6.12,<0.7"
_LEAST_VERSION, _NEXT_VERSION = (0, 6, 12), (0, 7, 0)
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
# The smallest workspace for partial sums that FlashInfer recommends.
_MIN_WORKSPACE = 128 << 20
# Rows times query heads of a group in its kernels' largest tile; tiles per multiprocessor if keys
# are split.
_TILE, _TILES_EACH = 128, 2
# Bytes that each wrapper allocates for its plan, and plans of one pass at most.
_PLAN_BYTES, _MOST_PLANS = 9 << 20, 4
# Prompts run by what FlashInfer finds best (FlashAttention-3 on compute capability 9.0). Only the
# fa2 kernels take masks; they share a key head's queries and split long contexts, as few rows need.
_PROMPTS_BY, _NODES_BY = "auto", "fa2"


def obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why FlashInfer cannot run a model's attention.

    None if nothing is known to prevent it.
    """
    if device.type != "cuda":
        return "FlashInfer needs an NVIDIA GPU"
    if dtype not in _DTYPES:
        return f"FlashInfer has no {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in _HEAD_DIMS:
        return f"FlashInfer does not support this model's head size of {config.head_dim}"
    advice = f"pip install '{REQUIREMENT}'"
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"FlashInfer is not installed: {advice}"
    if not _LEAST_VERSION <= tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < _NEXT_VERSION:
        return f"FlashInfer {version} is installed, which is not supported: {advice}"
    return None


def workspace_bytes(config: ModelConfig, device: torch.device) -> int:
    """Return the bytes that FlashInferAttention allocates on the device."""
    return _partial_sums(config, device) + _MOST_PLANS * _PLAN_BYTES


def _partial_sums(config: ModelConfig, device: torch.device) -> int:
    """Return the bytes of the partial sums of programs that share a row's keys.

    They include 1 MiB for alignment.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    tiles = _TILES_EACH * processors // config.num_kv_heads
    return max(_MIN_WORKSPACE, 4 * tiles * _TILE * config.num_heads * (config.head_dim + 1) + (1 << 20))


class _Launch(NamedTuple):
    """Rows ``first`` up to ``end`` of a pass, and the function that runs their attention."""

    first: int
    end: int
    run: Callable[..., torch.Tensor]


class FlashInferAttention:
    """Compute attention over one KV cache.

    Call ``plan`` once a pass, then ``attend`` once a layer, from one thread at a time.

    Args:
        config: of the model whose keys and values are in ``cache``.
        every_pass: whether it runs all passes of batches from the host; otherwise only passes
            without a graph, which are long prompts'. DevicePass reads it.
    """

    def __init__(self, config: ModelConfig, cache: KVCache, *, every_pass: bool = False) -> None:
        self.every_pass = every_pass
        self._config, self._cache = config, cache
        # Kernels of one stream run one after the other, so all plans share the workspace.
        num_bytes = _partial_sums(config, cache.data.device)
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=cache.data.device)
        self._plans: dict[bool, list[_Plan]] = {True: [], False: []}
        self._launches: list[_Launch] = []

    def plan(self, batch: ForwardBatch, runs: Runs) -> None:
        """Prepare all layers of a pass.

        Waits until the device has read the plans of the pass before.

        Raises:
            ValueError: the batch has a context that does not begin at the first KV slot.
        """
        self._launches.clear()
        used = {True: 0, False: 0}
        for rows in planned_rows(batch, runs, self._cache.block_size, _MOST_PLANS):
            plans = self._plans[rows.is_prompt]
            if used[rows.is_prompt] == len(plans):
                plans.append(_Plan(self._workspace, _PROMPTS_BY if rows.is_prompt else _NODES_BY))
            plan = plans[used[rows.is_prompt]]
            used[rows.is_prompt] += 1
            plan.prepare(rows, self._config, self._cache)
            self._launches.append(_Launch(rows.first, rows.end, plan.run))

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """Run one layer's attention for the planned batch.

        It computes what foretoken_kernels.gpu.tree_attention does.

        Args:
            query: [rows, num_heads, head_dim], last dimension contiguous.
            out: query's shape and dtype, contiguous; written in place.
        """
        cache = self._cache.keys(layer), self._cache.values(layer)
        for first, end, run in self._launches:
            run(query[first:end], cache, out=out[first:end])


class _Plan:
    """One of FlashInfer's wrappers, which holds a plan until the next one is made."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        import flashinfer

        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        self._device = workspace.device
        self._read: Any = torch.cuda.Event() if workspace.is_cuda else None  # type: ignore[no-untyped-call]
        self.run: Callable[..., torch.Tensor] = self._wrapper.run

    def prepare(self, rows: PlannedRows, config: ModelConfig, cache: KVCache) -> None:
        if self._read is not None:
            # The wrapper writes each plan to the same pinned memory, even if the last plan is still
            # being copied.
            self._read.synchronize()
        masks = rows.masks
        self._wrapper.plan(
            self._pinned(rows.row_starts),
            self._pinned(rows.block_starts),
            self._pinned(rows.blocks),
            self._pinned(rows.last_block_lens),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cache.block_size,
            packed_custom_mask=None if masks is None else self._pinned(masks.bits),
            causal=masks is None,
            q_data_type=cache.data.dtype,
            seq_lens=self._pinned(rows.lengths),
            max_token_per_sequence=int(np.diff(rows.row_starts).max()),
        )
        if masks is not None:
            # plan() counts the starts of packed masks in bits; the kernels count in bytes.
            self._wrapper._mask_indptr_buf.copy_(self._pinned(masks.starts), non_blocking=True)
        if self._read is not None:
            self._read.record()

    def _pinned(self, array: NDArray[Any]) -> torch.Tensor:
        """Return the array in pinned memory, so that copies do not wait.

        Torch keeps it until they have read it.
        """
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def compile_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what a model's passes need, or load it from FlashInfer's cache.

    The first start takes a minute or two.

    Raises whatever FlashInfer and its compilers raise if they fail.
    """
    started = time.perf_counter()
    cache = KVCache(1, 8, 16, config.num_kv_heads, config.head_dim, dtype, device)
    cache.data.zero_()
    attention = FlashInferAttention(config, cache)
    rows = 128
    query = torch.zeros(rows, config.num_heads, config.head_dim, dtype=dtype, device=device)
    prompt = chain_batch(np.zeros(rows, np.int32), 0, cache.block_size)
    # Two children of one root.
    prompt_rows, tree_rows = slice(0, rows), slice(0, 3)
    tree = chain_batch(np.zeros(3, np.int32), 0, cache.block_size)
    tree.context_lens[:] = 1
    tree.masks[1:, 0] = 2, 4
    for batch, taken in ((prompt, prompt_rows), (tree, tree_rows)):
        attention.plan(batch, runs_of(batch))
        attention.attend(0, query[taken], torch.empty_like(query[taken]))
    if device.type == "cuda":
        torch.cuda.synchronize()
    _log.info("FlashInfer's kernels ready in %.2f s", time.perf_counter() - started)
