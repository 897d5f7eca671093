"""A draft request cut into parts that fit a transport's buffers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foretoken.drafting import RAGGED_COLUMNS, ROW_COLUMNS, DraftRequest, starts_of
from foretoken.tree import Int32


class _Run(NamedTuple):
    """New tokens ``low`` to ``high`` of a row, by their index in the request; or of its prediction."""

    row: int
    low: int
    high: int


def split_request(request: DraftRequest, token_capacity: int, block_size: int) -> list[DraftRequest]:
    """The same request in parts of at most ``token_capacity`` new tokens each, and as many tokens of predictions.

    All parts but the last only extend. The last has every row, with the last new token of each, and asks for the
    trees. All carry the request's step id. ``token_capacity`` is at least the number of rows.
    """
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
        _Run(row, int(starts[row + 1]) - min(int(counts[row]), 1), int(starts[row + 1])) for row in range(len(counts))
    ]
    parts.append(_part(request, last, block_size, is_last=True))
    return parts


def _fill(lows: Int32, ends: Int32, capacity: int) -> list[list[_Run]]:
    """Runs of each row's items, in order, in lists of at most ``capacity`` items."""
    lists: list[list[_Run]] = []
    room = 0
    for row in range(len(lows)):
        low, end = int(lows[row]), int(ends[row])
        while low < end:
            if room == 0:
                lists.append([])
                room = capacity
            high = min(end, low + room)
            lists[-1].append(_Run(row, low, high))
            room -= high - low
            low = high
    return lists


def _predictions_first(request: DraftRequest, capacity: int) -> tuple[list[DraftRequest], DraftRequest]:
    """Parts with predictions and no tokens, and the request without predictions."""
    parts = []
    told = request.lengths - np.diff(request.new_token_starts)
    for runs in _fill(request.prediction_starts[:-1], request.prediction_starts[1:], capacity):
        rows = np.array([run.row for run in runs])
        prediction = np.concatenate([request.prediction[run.low : run.high] for run in runs])
        parts.append(
            _rows(
                request,
                rows,
                lengths=told[rows],
                max_nodes=np.ones(len(runs), np.int32),
                prediction_starts=starts_of([run.high - run.low for run in runs]),
                prediction=prediction,
            )
        )
    return parts, _rows(request, np.arange(request.num_rows), **_ragged(request, without="prediction"))


def _part(request: DraftRequest, runs: list[_Run], block_size: int, *, is_last: bool = False) -> DraftRequest:
    """The rows of ``runs`` with those new tokens and what belongs to them; the last part keeps the predictions."""
    rows = np.array([run.row for run in runs])
    ends = request.new_token_starts[rows + 1]
    lengths = request.lengths[rows] - (ends - np.array([run.high for run in runs], np.int32))
    hidden = [_hidden_of(request, run) for run in runs]
    blocks = [_blocks_of(request, run, int(length), block_size) for run, length in zip(runs, lengths, strict=True)]
    columns = {
        "lengths": lengths,
        "new_token_starts": starts_of([run.high - run.low for run in runs]),
        "new_tokens": np.concatenate([request.new_tokens[run.low : run.high] for run in runs]),
        "hidden_starts": starts_of([len(part) for part in hidden]),
        "hidden": np.concatenate(hidden),
        "block_starts": starts_of([len(part) for part in blocks]),
        "block_ids": np.concatenate(blocks),
    }
    if is_last:
        return _rows(
            request, rows, **columns, prediction_starts=request.prediction_starts, prediction=request.prediction
        )
    return _rows(request, rows, **columns, max_nodes=np.ones(len(runs), np.int32))


def _hidden_of(request: DraftRequest, run: _Run) -> np.ndarray:
    """Feature rows of a run's tokens: none for tokens that come before the row's first one with features."""
    end = int(request.hidden_starts[run.row + 1])
    tokens_end = int(request.new_token_starts[run.row + 1])
    first = int(request.hidden_starts[run.row])
    low, high = (max(end - (tokens_end - index), first) for index in (run.low, run.high))
    return request.hidden[low:high]


def _blocks_of(request: DraftRequest, run: _Run, length: int, block_size: int) -> Int32:
    """Blocks of the positions [length - tokens of the run, length)."""
    first = int(request.block_starts[run.row])
    if first == request.block_starts[run.row + 1] or run.low == run.high:
        return request.block_ids[:0]
    told = int(request.lengths[run.row]) - int(np.diff(request.new_token_starts)[run.row])
    row_first = told // block_size
    low = (length - (run.high - run.low)) // block_size - row_first
    return request.block_ids[first + low : first + (length - 1) // block_size - row_first + 1]


def _ragged(request: DraftRequest, without: str) -> dict[str, np.ndarray]:
    """All ragged columns as they are, but for one that is emptied."""
    columns = {}
    for values, starts in RAGGED_COLUMNS.items():
        is_kept = values != without
        columns[values] = getattr(request, values) if is_kept else getattr(request, values)[:0]
        columns[starts] = getattr(request, starts) if is_kept else np.zeros(request.num_rows + 1, np.int32)
    return columns


def _rows(request: DraftRequest, rows: np.ndarray, **columns: np.ndarray) -> DraftRequest:
    """Some rows of a request: row columns are taken unless given, ragged ones are empty unless given."""
    for name in ROW_COLUMNS:
        columns.setdefault(name, getattr(request, name)[rows])
    for values, starts in RAGGED_COLUMNS.items():
        columns.setdefault(values, getattr(request, values)[:0])
        columns.setdefault(starts, np.zeros(len(rows) + 1, np.int32))
    return DraftRequest(epoch=request.epoch, step_id=request.step_id, **columns)
