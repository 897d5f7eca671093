"""The start-up check of strict mode: does a row get the same bits in every batch, on this machine, with this model?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch, chain_batch
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
    expected = torch.stack(
        [forward(chain_batch(tokens[row : row + 1], row, block_size))[0].clone() for row in range(length)]
    )
    for done, count in enumerate(counts):
        progress(done, len(counts), "checking numerics")
        for first in range(0, length - count + 1, count):
            logits = forward(chain_batch(tokens[first : first + count], first, block_size))
            if not torch.equal(logits, expected[first : first + count]):
                return False
    progress(len(counts), len(counts), "checking numerics")
    return True
