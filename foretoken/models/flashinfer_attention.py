"""FlashInfer as the attention of a model's passes on a GPU. It is planned on the host, so no graph can hold it.

Written for flashinfer-python 0.6.12, which is imported where its attention is wanted and nowhere else.
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
# What FlashInfer advises as its least room for partial sums.
_LEAST_WORKSPACE = 128 << 20
# Rows, times query heads of a group, of its kernels' largest tile, and such tiles of a multiprocessor where keys are
# split.
_TILE, _TILES_EACH = 128, 2
# Each wrapper allocates so much for its plan, and a pass has no more than so many plans.
_PLAN_BYTES, _MOST_PLANS = 9 << 20, 4
# Prompts by what FlashInfer finds best (FlashAttention-3 on compute capability 9.0). The other kernels alone take
# masks; they share a key head's queries and split long contexts, which few rows need.
_PROMPTS_BY, _NODES_BY = "auto", "fa2"


def obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model's attention cannot run by FlashInfer; None: nothing is known that speaks against it."""
    if device.type != "cuda":
        return "FlashInfer needs an NVIDIA GPU"
    if dtype not in _DTYPES:
        return f"FlashInfer has no {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has no heads of {config.head_dim} numbers, as this model's are"
    advice = f"pip install '{REQUIREMENT}'"
    try:
        version = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return f"FlashInfer is not installed: {advice}"
    if not _LEAST_VERSION <= tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < _NEXT_VERSION:
        return f"FlashInfer {version} is installed, which this was not written for: {advice}"
    return None


def workspace_bytes(config: ModelConfig, device: torch.device) -> int:
    """What FlashInferAttention takes on the device."""
    return _partial_sums(config, device) + _MOST_PLANS * _PLAN_BYTES


def _partial_sums(config: ModelConfig, device: torch.device) -> int:
    """Bytes of what programs that share a row's keys leave for each other, and 1 MiB for alignment."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    tiles = _TILES_EACH * processors // config.num_kv_heads
    return max(_LEAST_WORKSPACE, 4 * tiles * _TILE * config.num_heads * (config.head_dim + 1) + (1 << 20))


class _Launch(NamedTuple):
    """Rows ``first`` up to ``end`` of a pass, and what runs their attention."""

    first: int
    end: int
    run: Callable[..., torch.Tensor]


class FlashInferAttention:
    """Attention over one cache: ``plan`` once a pass, then ``attend`` once a layer. Not for two threads at once.

    Args:
        config: of the model whose keys and values are in ``cache``.
        every_pass: whether it takes all passes that the host has the rows of; if not, those that have no graph: long
            prompts'. Read by DevicePass.
    """

    def __init__(self, config: ModelConfig, cache: KVCache, *, every_pass: bool = False) -> None:
        self.every_pass = every_pass
        self._config, self._cache = config, cache
        # Kernels of one stream run one after the other, so all plans may share it.
        num_bytes = _partial_sums(config, cache.data.device)
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=cache.data.device)
        self._plans: dict[bool, list[_Plan]] = {True: [], False: []}
        self._launches: list[_Launch] = []

    def plan(self, batch: ForwardBatch, runs: Runs) -> None:
        """Prepare all layers of a pass. Waits until the device has read the plans of the pass before.

        Raises:
            ValueError: the batch has contexts that begin later than at the first slot.
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
        """As foretoken_kernels.gpu.tree_attention of the planned batch, over a layer's keys and values.

        Args:
            query: [rows, num_heads, head_dim], last dimension contiguous.
            out: query's shape and dtype, contiguous; written in place.
        """
        cache = self._cache.keys(layer), self._cache.values(layer)
        for first, end, run in self._launches:
            run(query[first:end], cache, out=out[first:end])


class _Plan:
    """One of FlashInfer's plans, which lives until its next one is made."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        import flashinfer

        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        self._device = workspace.device
        self._read: Any = torch.cuda.Event() if workspace.is_cuda else None  # type: ignore[no-untyped-call]
        self.run: Callable[..., torch.Tensor] = self._wrapper.run

    def prepare(self, rows: PlannedRows, config: ModelConfig, cache: KVCache) -> None:
        if self._read is not None:
            # The wrapper writes each plan to the same pinned memory, whether or not the last one has left it.
            self._read.synchronize()
        masks = rows.masks
        self._wrapper.plan(
            self._pinned(rows.row_starts),
            self._pinned(rows.page_starts),
            self._pinned(rows.pages),
            self._pinned(rows.last_page_lens),
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
            # plan() counts where a packed mask begins in bits, and its kernels count in bytes.
            self._wrapper._mask_indptr_buf.copy_(self._pinned(masks.starts), non_blocking=True)
        if self._read is not None:
            self._read.record()

    def _pinned(self, array: NDArray[Any]) -> torch.Tensor:
        """In memory from which a copy waits for nothing; torch keeps it until such a copy has read it."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def compile_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what a model's passes need, or load what is in FlashInfer's cache: a minute or two at the first start.

    Raises whatever FlashInfer and its compilers raise where it cannot be had.
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
