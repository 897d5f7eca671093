"""Check every index of a batch before compiled code uses it as an address."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.compile import compiled

_MASK_BITS = 64


@compiled
def longest_path(  # noqa: PLR0913 - the fields of a ForwardBatch
    token_ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    kv_slots: NDArray[np.int32],
    row_seqs: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    masks: NDArray[np.uint64],
    tree_starts: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    logit_rows: NDArray[np.int32],
    context_starts: NDArray[np.int32],
    limits: tuple[int, int, int, int],
) -> int:
    """Return the most positions that one row attends to, or a negative number for a bad index.

    The arrays are the fields of a ForwardBatch.

    Args:
        context_starts: int32 [seqs]; as long as ``tree_starts`` and ``block_tables``.
        limits: (vocab_size, max_positions, num_blocks, block_size).

    Returns:
        ``-1 - r`` if an index of row r is out of range; -1 also if a logit row does not exist.
    """
    vocab_size, max_positions, num_blocks, block_size = limits
    num_rows = len(token_ids)
    reach = block_tables.shape[1] * block_size
    longest = np.int64(0)
    for row in range(num_rows):
        seq = row_seqs[row]
        good = 0 <= token_ids[row] < vocab_size and 0 <= positions[row] < max_positions
        good = good and 0 <= kv_slots[row] < num_blocks * block_size and 0 <= seq < len(context_starts)
        if not good or not 0 <= context_starts[seq] <= context_lens[row] <= reach:
            return -1 - row
        length = np.int64(context_lens[row]) - context_starts[seq]
        first, end = context_starts[seq] // block_size, (context_lens[row] + block_size - 1) // block_size
        for block in range(first, end if length > 0 else first):
            if not 0 <= block_tables[seq, block] < num_blocks:
                return -1 - row
        for word in range(masks.shape[1]):
            bits = masks[row, word]
            node = np.int64(tree_starts[seq]) + word * _MASK_BITS
            while bits != np.uint64(0):
                if bits & np.uint64(1):
                    if not 0 <= node < reach or not 0 <= block_tables[seq, node // block_size] < num_blocks:
                        return -1 - row
                    length += 1
                bits >>= np.uint64(1)
                node += 1
        if length == 0:
            return -1 - row
        longest = max(longest, length)
    for i in range(len(logit_rows)):
        if not 0 <= logit_rows[i] < num_rows:
            return -1
    return int(longest)
