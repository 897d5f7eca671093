"""The start-up check of strict mode: does a row get the same bits in every batch, on this machine, with this model?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import Progress

# Around every tile size of the kernels, and one prefill chunk.
_ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64, 96)


def rows_are_independent(
    forward: Callable[[ForwardBatch], torch.Tensor],
    config: ModelConfig,
    block_size: int,
    num_slots: int,
    progress: Progress,
) -> bool:
    """Run one text in prefill chunks of many sizes and compare each row's logits with those of one row a pass.

    Covers all row counts between which the kernels switch, and every position of a row in its batch. Writes to the
    first slots of the cache. ``progress`` is called with (passes done, passes, what).
    """
    length = min(_ROW_COUNTS[-1], num_slots, config.max_position_embeddings)
    tokens = (np.arange(length, dtype=np.int64) * 7919 % config.vocab_size).astype(np.int32)
    counts = [count for count in _ROW_COUNTS if count <= length]
    expected = torch.stack([forward(_chunk(tokens, row, row + 1, block_size))[0].clone() for row in range(length)])
    for done, count in enumerate(counts):
        progress(done, len(counts), "checking numerics")
        for first in range(0, length - count + 1, count):
            logits = forward(_chunk(tokens, first, first + count, block_size))
            if not torch.equal(logits, expected[first : first + count]):
                return False
    progress(len(counts), len(counts), "checking numerics")
    return True


def _chunk(tokens: np.ndarray[tuple[int], np.dtype[np.int32]], first: int, end: int, block_size: int) -> ForwardBatch:
    positions = np.arange(first, end, dtype=np.int32)
    return ForwardBatch(
        token_ids=tokens[first:end],
        positions=positions,
        slot_mapping=positions,
        row_seqs=np.zeros(end - first, np.int32),
        context_lens=positions + 1,
        masks=np.zeros((end - first, 1), np.uint64),
        tree_starts=np.zeros(1, np.int32),
        block_tables=np.arange(-(-end // block_size), dtype=np.int32)[None],
        logit_rows=np.arange(end - first, dtype=np.int32),
    )
