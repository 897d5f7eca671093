"""Measures at start what a step costs by its number of rows, so that the first request drafts as wide as it should."""

from __future__ import annotations

import statistics
import time

import numpy as np

from foretoken.models.batch import ForwardBatch, chain_batch
from verifier_svc.model.target_runner import TargetRunner

# Tokens of context behind the measured rows: short, since what counts is the difference that rows make.
CONTEXT = 128
REPEATS = 7


def row_counts(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts


def measure_step_costs(runner: TargetRunner, *, num_tokens: int, block_size: int, most_rows: int) -> dict[int, float]:
    """Median seconds of a forward pass by row count. Writes to the cache: only before the first sequence runs.

    ``num_tokens``: positions that one sequence may take, by context and by cache; at least 2.
    """
    most = min(most_rows, num_tokens // 2)
    context = min(CONTEXT, num_tokens - most)
    counts = row_counts(most)
    batches = [chain_batch(np.zeros(rows, np.int32), context, block_size) for rows in counts]
    for batch in batches:
        _seconds(runner, batch)
    # In turns: what disturbs the machine for a moment disturbs few passes of each size, not all of one.
    rounds = [[_seconds(runner, batch) for batch in batches] for _ in range(REPEATS)]
    return {rows: statistics.median(times) for rows, *times in zip(counts, *rounds, strict=True)}


def _seconds(runner: TargetRunner, batch: ForwardBatch) -> float:
    """Of a pass, waited for: on a GPU a logit is there when all of them are."""
    began = time.perf_counter()
    runner.forward(batch)[0, 0].item()
    return time.perf_counter() - began
