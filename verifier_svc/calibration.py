"""Measures at start what a step costs by its number of rows, so that the first request drafts as wide as it should."""

from __future__ import annotations

import statistics
import time

import numpy as np

from foretoken.models.batch import ForwardBatch, chain_batch
from verifier_svc.engine import TargetRunner

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
    costs = {}
    for rows in row_counts(most):
        batch = chain_batch(np.zeros(rows, np.int32), context, block_size)
        _run(runner, batch)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            _run(runner, batch)
            times.append(time.perf_counter() - began)
        costs[rows] = statistics.median(times)
    return costs


def _run(runner: TargetRunner, batch: ForwardBatch) -> None:
    """A pass, waited for: on a GPU a logit is there when all of them are."""
    runner.forward(batch)[0, 0].item()
