"""The device runner compiles at its start what it needs later."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from foretoken_kernels.gpu import tree_attention as attention

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import table_bucket
from foretoken.models.device_sizes import PassSizes
from verifier_svc.model.device_runner import DeviceRunner

BLOCK = 16
# Llama-3.1-8B's.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


def attention_kernel(seqs: int, max_seq_rows: int, context: int, max_model_len: int) -> Hashable:
    """Return the key of the attention kernel that such a batch needs."""
    most_keys = min(table_bucket(-(-context // BLOCK)) * BLOCK, max_model_len) + 64
    rows = 1 << (max_seq_rows - 1).bit_length()
    tile = attention._tile(seqs, rows, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_DIM, False, most_keys)
    warps = seqs * -(-rows // tile.rows) * NUM_KV_HEADS * (4 if tile.one_loop else tile.num_warps)
    workspace = attention.attention_workspace(8192, 1, 1, 16, "cpu")
    splits = attention._num_splits(seqs * max_seq_rows, tile.splits, warps, most_keys, workspace)
    return tile._replace(splits=1), splits > 1


@pytest.mark.parametrize("max_model_len", [1024, 2048, 131072])
def test_decode_finds_its_attention_compiled(max_model_len: int) -> None:
    """The number of sequences, their trees and contexts do not matter."""
    compiled: set[Hashable] = set()

    def forward(batch: ForwardBatch) -> None:
        counts = np.bincount(batch.row_seqs)
        compiled.add(attention_kernel(len(counts), int(counts.max()), int(batch.context_lens.max()), max_model_len))

    runner = SimpleNamespace(
        _device=torch.device("cpu"),
        _strict=False,
        _sizes=PassSizes(rows=4096, wanted=4096, seqs=64, blocks=8192),
        max_model_len=max_model_len,
        cache=SimpleNamespace(num_kv_slots=400_000),
        block_size=BLOCK,
        forward=forward,
        commit=lambda src, dst: None,
    )
    DeviceRunner.warm_up(cast("DeviceRunner", runner), max_nodes=64)
    for seqs, rows, context in itertools.product(
        (1, 2, 3, 4, 8, 16, 32, 64), (1, 2, 6, 10, 16, 20, 32, 64), (20, 2000, 9000)
    ):
        if context <= max_model_len:
            kernel = attention_kernel(seqs, rows, context, max_model_len)
            assert kernel in compiled, (seqs, rows, context, kernel)
