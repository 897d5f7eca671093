"""The start-up check of strict mode.

A row must get the same bits in every batch on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch, chain_batch
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import Progress
from foretoken.tree import MASK_WORD_BITS, ancestor_mask, depths

# Around every tile size of the CPU's kernels, and one prefill chunk.
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64, 96)
# A mask of one word; half of the nodes are the text, half are other tokens.
_TREE_NODES = MASK_WORD_BITS
_WHAT = "checking strict numerics"


def rows_are_independent(
    forward: Callable[[ForwardBatch], torch.Tensor],
    config: ModelConfig,
    block_size: int,
    most_tokens: int,
    progress: Progress,
    more_counts: tuple[int, ...] = (),
) -> bool:
    """Return whether each row of a text has the logits of a pass over that row alone.

    The text runs in prefill chunks of many sizes, and its end as nodes of a tree. This covers all
    row counts between which the kernels switch, and every position of a row in its batch. It writes
    to the first KV slots.

    Args:
        most_tokens: tokens that the cache, a context and a pass hold.
        progress: called with (passes done, passes, what).
        more_counts: further row counts above 96 between which the kernels switch, ascending.
    """
    row_counts = _ROW_COUNTS + more_counts
    length = min(row_counts[-1], most_tokens, config.max_position_embeddings)
    tokens = _text(length, config.vocab_size)
    counts = [count for count in row_counts if count <= length]
    # Small chunks only run over the beginning of the text.
    ends = [min(length, max(count, _ROW_COUNTS[-1])) for count in counts]
    total = length + sum(end // count for count, end in zip(counts, ends, strict=True)) + 1
    done = 0

    def passed(batch: ForwardBatch) -> torch.Tensor:
        nonlocal done
        progress(done, total, _WHAT)
        done += 1
        return forward(batch)

    expected = torch.stack(
        [passed(chain_batch(tokens[row : row + 1], row, block_size))[0].clone() for row in range(length)]
    )
    for count, end in zip(counts, ends, strict=True):
        for first in range(0, end - count + 1, count):
            logits = passed(chain_batch(tokens[first : first + count], first, block_size))
            if not torch.equal(logits, expected[first : first + count]):
                return False
    agrees = _tree_agrees(passed, expected, tokens, config, block_size)
    progress(done, total, _WHAT)
    return agrees


def rows_look_independent(
    forward: Callable[[ForwardBatch], torch.Tensor], config: ModelConfig, block_size: int, most_tokens: int
) -> bool:
    """Return whether a few rows pass.

    This check of some passes is for machines where rows_are_independent has passed before. It runs
    the largest of that check's prefill chunks below 97 rows, single rows and the tree. So kernels
    and buffers are ready after it, too.
    """
    length = min(_ROW_COUNTS[-1], most_tokens, config.max_position_embeddings)
    tokens = _text(length, config.vocab_size)
    expected = forward(chain_batch(tokens, 0, block_size)).clone()
    for row in sorted({0, length // 2, length - 1}):
        if not torch.equal(forward(chain_batch(tokens[row : row + 1], row, block_size))[0], expected[row]):
            return False
    return _tree_agrees(forward, expected, tokens, config, block_size)


def _text(length: int, vocab_size: int) -> NDArray[np.int32]:
    return (np.arange(length, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


def _tree_agrees(
    forward: Callable[[ForwardBatch], torch.Tensor],
    expected: torch.Tensor,
    tokens: NDArray[np.int32],
    config: ModelConfig,
    block_size: int,
) -> bool:
    """Return whether the text's end has the ``expected`` logits as nodes of a tree."""
    length = len(tokens)
    num_texts = min((length + 1) // 2, _TREE_NODES // 2)
    first = length - (2 * num_texts - 1)
    logits = forward(_tree_batch(tokens[first : first + num_texts], first, config.vocab_size, block_size))
    return torch.equal(logits[::2], expected[first : first + num_texts])


def _tree_batch(text: NDArray[np.int32], first: int, vocab_size: int, block_size: int) -> ForwardBatch:
    """Return a tree whose root is at position ``first``.

    Its even nodes are the text. Each odd node is another child of the even node before it.
    """
    size = 2 * len(text) - 1
    tokens, parents = np.empty(size, np.int32), np.arange(-1, size - 1, dtype=np.int32)
    tokens[::2], tokens[1::2] = text, (text[1:] + 1) % vocab_size
    parents[2::2] = np.arange(0, size - 2, 2)
    return replace(
        chain_batch(tokens, first, block_size),
        positions=first + depths(parents),
        context_lens=np.full(size, first, np.int32),
        masks=ancestor_mask(parents),
        tree_starts=np.array([first], np.int32),
    )
