"""Measure a step's cost by its rows at start, so that the first trees have the right size."""

from __future__ import annotations

import time

import numpy as np

from foretoken.models.batch import ForwardBatch, chain_batch
from verifier_svc.model.target_runner import TargetRunner

# Tokens of context before the measured rows. It is short, since only the effect of the rows
# matters.
CONTEXT = 128
REPEATS = 7


def row_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most``."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts


def measure_step_costs(runner: TargetRunner, *, num_tokens: int, block_size: int, most_rows: int) -> dict[int, float]:
    """Return the least seconds of a forward pass by row count: other processes only add to them.

    Call it before the first sequence runs, because it writes to the cache.

    Args:
        num_tokens: positions that context and cache leave for one sequence, at least 2.
        block_size: KV slots of one block.
        most_rows: largest row count to measure.
    """
    most = min(most_rows, num_tokens // 2)
    context = min(CONTEXT, num_tokens - most)
    counts = row_counts(most)
    batches = [chain_batch(np.zeros(rows, np.int32), context, block_size) for rows in counts]
    for batch in batches:
        _seconds(runner, batch)
    # Alternate the sizes, so that a short disturbance hits few passes of each size, not all of one.
    rounds = [[_seconds(runner, batch) for batch in batches] for _ in range(REPEATS)]
    return {rows: min(times) for rows, *times in zip(counts, *rounds, strict=True)}


def _seconds(runner: TargetRunner, batch: ForwardBatch) -> float:
    """Return the seconds of one pass. Reading a logit waits until a GPU has finished."""
    began = time.perf_counter()
    runner.forward(batch)[0, 0].item()
    return time.perf_counter() - began
