"""Split a draft request into parts that fit a transport's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from foretoken.drafting import RAGGED_COLUMNS, DraftRequest, starts_of
from foretoken.tree import Int32


class _TokenRange(NamedTuple):
    """New tokens ``low`` to ``high`` of a row, or tokens of its prediction.

    They are named by their index in the request.
    """

    row: int
    low: int
    high: int


def split_request(request: DraftRequest, token_capacity: int, block_size: int) -> list[DraftRequest]:
    """Split a request into parts.

    Each has at most ``token_capacity`` new tokens and as many prediction tokens.

    The last part has every row, with its last new token, and asks for the trees; the other parts
    only add tokens. All have the request's step id. ``token_capacity`` is at least the number of
    rows. A request whose tokens are in device memory stays whole.
    """
    if request.device_step is not None:
        return [request]
    parts: list[DraftRequest] = []
    if len(request.prediction) > token_capacity:
        parts, request = _predictions_first(request, token_capacity)
    if len(request.new_tokens) <= token_capacity:
        return [*parts, request]
    starts = request.new_token_starts
    counts = np.diff(starts)
    for runs in _fill(starts[:-1], starts[1:] - np.minimum(counts, 1), token_capacity):
        parts.append(_part(request, runs, block_size))
    last = [
        _TokenRange(row, int(starts[row + 1]) - min(int(counts[row]), 1), int(starts[row + 1]))
        for row in range(len(counts))
    ]
    parts.append(_part(request, last, block_size, is_last=True))
    return parts


def _fill(lows: Int32, ends: Int32, capacity: int) -> list[list[_TokenRange]]:
    """Return runs of each row's items, in order, in lists of at most ``capacity`` items."""
    lists: list[list[_TokenRange]] = []
    room = 0
    for row in range(len(lows)):
        low, end = int(lows[row]), int(ends[row])
        while low < end:
            if room == 0:
                lists.append([])
                room = capacity
            high = min(end, low + room)
            lists[-1].append(_TokenRange(row, low, high))
            room -= high - low
            low = high
    return lists


def _predictions_first(request: DraftRequest, capacity: int) -> tuple[list[DraftRequest], DraftRequest]:
    """Return parts with predictions and no tokens, and the request without predictions."""
    parts = []
    sent = request.lengths - np.diff(request.new_token_starts)
    for runs in _fill(request.prediction_starts[:-1], request.prediction_starts[1:], capacity):
        rows = np.array([run.row for run in runs])
        prediction = np.concatenate([request.prediction[run.low : run.high] for run in runs])
        counts = [run.high - run.low for run in runs]
        parts.append(_rows(request, rows, {"prediction": (prediction, counts)}, lengths=sent[rows], only_adds=True))
    whole = {name: (getattr(request, name), _counts(request, name)) for name in ("new_tokens", "hidden", "block_ids")}
    return parts, _rows(request, np.arange(request.num_rows), whole)


def _part(request: DraftRequest, runs: list[_TokenRange], block_size: int, *, is_last: bool = False) -> DraftRequest:
    """Return the rows of ``runs`` with their new tokens; the last part also has the predictions."""
    rows = np.array([run.row for run in runs])
    ends = request.new_token_starts[rows + 1]
    lengths = request.lengths[rows] - (ends - np.array([run.high for run in runs], np.int32))
    hidden = [_hidden_of(request, run) for run in runs]
    blocks = [_blocks_of(request, run, int(length), block_size) for run, length in zip(runs, lengths, strict=True)]
    new_tokens = [request.new_tokens[run.low : run.high] for run in runs]
    ragged = {
        name: (np.concatenate(parts), [len(part) for part in parts])
        for name, parts in (("new_tokens", new_tokens), ("hidden", hidden), ("block_ids", blocks))
    }
    if is_last:
        ragged["prediction"] = request.prediction, _counts(request, "prediction")
    return _rows(request, rows, ragged, lengths=lengths, only_adds=not is_last)


def _hidden_of(request: DraftRequest, run: _TokenRange) -> np.ndarray:
    """Return the hidden states of a run's tokens.

    Tokens before the row's first hidden state have none.
    """
    end = int(request.hidden_starts[run.row + 1])
    tokens_end = int(request.new_token_starts[run.row + 1])
    first = int(request.hidden_starts[run.row])
    low, high = (max(end - (tokens_end - index), first) for index in (run.low, run.high))
    return request.hidden[low:high]


def _blocks_of(request: DraftRequest, run: _TokenRange, length: int, block_size: int) -> Int32:
    """Return the blocks of the positions [length - tokens of the run, length)."""
    first = int(request.block_starts[run.row])
    if first == request.block_starts[run.row + 1] or run.low == run.high:
        return request.block_ids[:0]
    sent = int(request.lengths[run.row]) - int(np.diff(request.new_token_starts)[run.row])
    row_first = sent // block_size
    low = (length - (run.high - run.low)) // block_size - row_first
    return request.block_ids[first + low : first + (length - 1) // block_size - row_first + 1]


def _counts(request: DraftRequest, name: str) -> list[int]:
    """Return the number of items of each row in a ragged column."""
    counts: list[int] = np.diff(getattr(request, RAGGED_COLUMNS[name])).tolist()
    return counts


def _rows(
    request: DraftRequest,
    rows: np.ndarray,
    ragged: Mapping[str, tuple[np.ndarray, list[int]]],
    *,
    lengths: Int32 | None = None,
    only_adds: bool = False,
) -> DraftRequest:
    """Return some rows of a request.

    Args:
        ragged: values and each row's count of ragged columns by name; missing columns are empty.
        only_adds: ask for no trees.
    """
    records = request.rows[rows]
    if lengths is not None:
        records["lengths"] = lengths
    if only_adds:
        records["max_nodes"] = 1
    nothing = [0] * len(rows)
    columns = [ragged.get(name, (getattr(request, name)[:0], nothing)) for name in RAGGED_COLUMNS]
    starts = starts_of(*(counts for _, counts in columns))
    return DraftRequest(request.epoch, request.step_id, records, starts, *(values for values, _ in columns))
