"""FlashInferAttention with the arguments of the GPU's attention kernels.

See tests/kernels/attention_cases.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.device_batch import runs_of
from foretoken.models.flashinfer_attention import FlashInferAttention
from tests.kernels.attention_cases import Case, Heads
from tests.support.tiny_checkpoint import save_llama


def forward_batch(case: Case) -> ForwardBatch:
    """Return a case's rows; their tokens and KV slots do not matter."""
    counts = case.row_starts.cpu().diff().numpy()
    nothing = np.zeros(int(counts.sum()), np.int32)
    return ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        kv_slots=nothing,
        row_seqs=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        context_lens=case.context_lens.cpu().numpy(),
        masks=case.masks.cpu().numpy().view(np.uint64),
        tree_starts=case.tree_starts.cpu().numpy(),
        block_tables=case.block_tables.cpu().numpy(),
        logit_rows=nothing,
        context_starts=case.context_starts.cpu().numpy(),
    )


def config_of(heads: Heads, folder: Path) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return load_config(save_llama(folder, hidden_size=8 * num_heads, **sizes))


def attend(case: Case, config: ModelConfig) -> torch.Tensor:
    """Return [rows, num_heads, head_dim], as Case.attend does."""
    num_blocks = len(case.keys) // case.block_size
    cache = KVCache(
        2,
        num_blocks,
        case.block_size,
        config.num_kv_heads,
        config.head_dim,
        case.keys.dtype,
        case.keys.device,
    )
    cache.data.fill_(torch.nan)
    cache.keys(1).copy_(case.keys.view_as(cache.keys(1)))
    cache.values(1).copy_(case.values.view_as(cache.values(1)))
    attention = FlashInferAttention(config, cache, every_pass=True)
    batch = forward_batch(case)
    out = torch.full(case.query.shape, torch.nan, dtype=case.query.dtype, device=case.query.device)
    attention.plan(batch, runs_of(batch))
    attention.attend(1, case.query, out)
    return out
