"""Compute logprobs from logits on a GPU, and fetch a few numbers a row instead of the whole row."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from foretoken.results import TokenLogprobs

# Most rows at a time: each one takes about 50 bytes for each token of the vocabulary.
_MAX_ROWS = 16
_LOW_WORD = 0xFFFF_FFFF


def device_logprobs(
    logits: torch.Tensor, rows: Items[int], token_ids: Items[int], top_k: Items[int]
) -> list[TokenLogprobs]:
    """Return the logprobs of one token in each row, like verify.token_logprobs.

    A row's numbers have the same bits in any batch, because sums have a fixed order: halves are
    added again and again.

    Args:
        logits: float32 [any, vocab].
        rows: indices of the rows of ``logits`` to read.
        token_ids: one token for each of ``rows``.
        top_k: how many best tokens to add, for each of ``rows``.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(rows), _MAX_ROWS):
        some = slice(first, first + _MAX_ROWS)
        found += _logprobs(logits, rows[some], token_ids[some], top_k[some])
    return found


def _logprobs(logits: torch.Tensor, rows: Items[int], token_ids: Items[int], top_k: Items[int]) -> list[TokenLogprobs]:
    wanted = torch.tensor([list(rows), list(token_ids)], device=logits.device)
    # Adding zero gives 0.0 and -0.0 the same bits, since they compare as equal.
    values = logits[wanted[0]] + 0.0
    chosen_ids = wanted[1, :, None]
    chosen = values.gather(1, chosen_ids)
    log_sums = _log_sums(values.double())
    ids = torch.arange(values.shape[1], device=values.device)
    is_before = (values > chosen) | ((values == chosen) & (ids < chosen_ids))
    best = _best_ids(values, ids, min(max(top_k), len(ids)))
    numbers = torch.cat([chosen, values.gather(1, best)], dim=1).double() - log_sums
    integers = torch.cat([1 + is_before.sum(1, keepdim=True), best], dim=1).tolist()
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(best_ids[:count], logprobs[:count], strict=True)))
        for token, count, (rank, *best_ids), (logprob, *logprobs) in zip(
            token_ids, top_k, integers, numbers.tolist(), strict=True
        )
    ]


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
