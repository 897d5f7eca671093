"""Compute logprobs from logits on a GPU, and fetch a few numbers a row instead of the whole row."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch

from foretoken.results import TokenLogprobs

# Most rows at a time: each one takes about 50 bytes for each token of the vocabulary.
_MAX_ROWS = 16
_LOW_WORD = 0xFFFF_FFFF


class LogprobNumbers(NamedTuple):
    """The logprobs of one token in each of some rows, still on the device, or fetched.

    Attributes:
        logprobs: float64 [rows, 1 + best]: of the token, then of the best ones.
        integers: int64 [rows, 1 + best]: the token's rank, then the best tokens.
    """

    logprobs: torch.Tensor
    integers: torch.Tensor

    def to_host(self) -> LogprobNumbers:
        """Copy the numbers to pinned memory in stream order, without waiting."""
        return LogprobNumbers(*(_pinned(part) for part in self))

    def results(self, token_ids: Items[int], top_k: Items[int], rows: Items[int]) -> list[TokenLogprobs]:
        """Return the logprobs of ``rows``, with their tokens and how many best ones each wants."""
        logprobs, integers = self.logprobs.tolist(), self.integers.tolist()
        return [
            TokenLogprobs(
                token,
                logprobs[row][0],
                integers[row][0],
                tuple(zip(integers[row][1 : 1 + count], logprobs[row][1 : 1 + count], strict=True)),
            )
            for token, count, row in zip(token_ids, top_k, rows, strict=True)
        ]


def device_logprobs(
    logits: torch.Tensor, rows: Items[int], token_ids: Items[int], top_k: Items[int]
) -> list[TokenLogprobs]:
    """Return the logprobs of one token in each row, like verify.token_logprobs.

    Args:
        logits: float32 [any, vocab].
        rows: indices of the rows of ``logits`` to read.
        token_ids: one token for each of ``rows``.
        top_k: how many best tokens to add, for each of ``rows``.
    """
    if not rows:
        return []
    wanted = torch.tensor([list(rows), list(token_ids)], device=logits.device)
    return logprob_numbers(logits, wanted[0], wanted[1], max(top_k)).results(token_ids, top_k, range(len(rows)))


def logprob_numbers(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, most_best: int
) -> LogprobNumbers:
    """Launch the computation of logprobs, without waiting for it.

    A row's numbers have the same bits in any batch, because sums have a fixed order: halves are
    added again and again.

    Args:
        logits: float32 [any, vocab].
        rows: int64 [n]; indices of the rows of ``logits`` to read.
        token_ids: int64 [n]; one token for each of them.
        most_best: how many best tokens to add.
    """
    parts = [
        _numbers(logits, rows[first : first + _MAX_ROWS], token_ids[first : first + _MAX_ROWS], most_best)
        for first in range(0, len(rows), _MAX_ROWS)
    ]
    return LogprobNumbers(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _numbers(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, most_best: int) -> LogprobNumbers:
    # Adding zero gives 0.0 and -0.0 the same bits, since they compare as equal.
    values = logits[rows] + 0.0
    chosen_ids = token_ids[:, None]
    chosen = values.gather(1, chosen_ids)
    log_sums = _log_sums(values.double())
    ids = torch.arange(values.shape[1], device=values.device)
    is_before = (values > chosen) | ((values == chosen) & (ids < chosen_ids))
    best = _best_ids(values, ids, min(most_best, len(ids)))
    logprobs = torch.cat([chosen, values.gather(1, best)], dim=1).double() - log_sums
    return LogprobNumbers(logprobs, torch.cat([1 + is_before.sum(1, keepdim=True), best], dim=1))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return on_host.copy_(tensor, non_blocking=True)


def _log_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of exp, float64 [rows, 1]. ``values``: float64 [rows, vocab]."""
    largest = values.max(1, keepdim=True).values
    parts = torch.exp(values - largest)
    while (width := parts.shape[1]) > 1:
        half = width // 2
        left, right, rest = parts[:, :half], parts[:, half : 2 * half], parts[:, 2 * half :]
        parts = torch.cat([left + right, rest], dim=1)
    return largest + parts.log()


def _best_ids(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the largest values, int64 [rows, count], best first, lower ids first."""
    bits = values.view(torch.int32).long()
    # Sort keys: the floats' bits as integers of the same order, then the ids, reversed for ties.
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)
    keys = (ordered << 32) | (_LOW_WORD - ids)
    return _LOW_WORD - (keys.topk(count).values & _LOW_WORD)
