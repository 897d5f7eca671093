"""Draft requests for tests: literal ones by keyword, and random ones by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretoken.drafting import RAGGED_COLUMNS, DeviceStep, DraftBatch, DraftRequest, Float32
from foretoken.tree import Int32

UINT64 = st.integers(0, 2**64 - 1)
INT31 = st.integers(0, 2**31 - 1)


def draft_request(
    new_tokens: Sequence[Sequence[int]],
    *,
    epoch: int = 1,
    step_id: int = 1,
    hidden_width: int = 0,
    device_step: DeviceStep | None = None,
    **columns: Sequence[Any],
) -> DraftRequest:
    """Return a request with one row for each list of new tokens, in batch slots 0, 1, ...

    Other columns are as given, or plain defaults. ``hidden``: hidden states per row, each of
    ``hidden_width`` numbers.
    """
    rows = len(new_tokens)
    lengths = [max(len(tokens), 1) for tokens in new_tokens]
    defaults: dict[str, tuple[Sequence[Any], type[Any]]] = {
        "batch_slots": (range(rows), np.int32),
        "generations": ([1] * rows, np.int32),
        "lengths": (lengths, np.int32),
        "prompt_lengths": (lengths, np.int32),
        "max_nodes": ([4] * rows, np.int32),
        "max_depths": ([8] * rows, np.int32),
        "max_branches": ([4] * rows, np.int32),
        "salts": ([0] * rows, np.uint64),
        "seeds": ([0] * rows, np.uint64),
        "choice_indices": ([0] * rows, np.int32),
        "temperatures": ([0.0] * rows, np.float32),
        "top_ks": ([0] * rows, np.int32),
        "top_ps": ([1.0] * rows, np.float32),
        "min_ps": ([0.0] * rows, np.float32),
    }
    arrays = {name: np.array(columns.get(name, value), dtype) for name, (value, dtype) in defaults.items()}
    none = [[] for _ in range(rows)]
    ragged = {
        "new_tokens": new_tokens,
        "block_ids": columns.get("block_ids", none),
        "prediction": columns.get("prediction", none),
        "hidden": columns.get("hidden", none),
    }
    for name, starts in RAGGED_COLUMNS.items():
        arrays[starts] = np.cumsum([0, *map(len, ragged[name])]).astype(np.int32)
        arrays[name] = np.array([value for values in ragged[name] for value in values], np.int32)
    width = hidden_width if hidden_width else 0
    arrays["hidden"] = arrays["hidden"].astype(np.float32).reshape(-1, width) if width else np.zeros((0, 0), np.float32)
    return replace(DraftRequest.of_columns(epoch, step_id, arrays), device_step=device_step)


@st.composite
def draft_requests(
    draw: st.DrawFn,
    *,
    max_rows: int = 6,
    max_nodes: int = 16,
    max_tokens: int = 20,
    hidden_width: int = 0,
    block_size: int = 0,
) -> DraftRequest:
    """Draw values that fit the columns, a batch slot a row; no blocks if ``block_size`` is 0."""
    rows = draw(st.integers(1, max_rows))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    new_tokens = column(st.lists(INT31, min_size=0, max_size=max_tokens))
    lengths = [len(tokens) + before for tokens, before in zip(new_tokens, column(st.integers(0, 999)), strict=True)]
    return draft_request(
        new_tokens,
        epoch=draw(UINT64),
        step_id=draw(st.integers(1, 2**64 - 1)),
        batch_slots=draw(st.permutations(range(max_rows)))[:rows],
        generations=column(INT31),
        lengths=lengths,
        prompt_lengths=column(INT31),
        max_nodes=column(st.integers(1, max_nodes)),
        salts=column(UINT64),
        seeds=column(UINT64),
        choice_indices=column(INT31),
        max_depths=column(st.integers(1, max_nodes)),
        max_branches=column(st.integers(1, max_nodes)),
        temperatures=column(st.floats(0, 2, width=32)),
        top_ks=column(INT31),
        top_ps=column(st.floats(0, 1, width=32)),
        min_ps=column(st.floats(0, 1, width=32)),
        prediction=column(st.lists(INT31, max_size=max_tokens)),
        hidden_width=hidden_width,
        hidden=[_hidden_states(draw, len(tokens), hidden_width) for tokens in new_tokens],
        block_ids=[
            draw(st.lists(INT31, min_size=count, max_size=count))
            for count in map(_num_blocks, lengths, map(len, new_tokens), [block_size] * rows)
        ],
    )


def _hidden_states(draw: st.DrawFn, most: int, width: int) -> list[list[int]]:
    """Draw hidden states of some of the last tokens, none if ``width`` is 0."""
    count = draw(st.integers(0, most)) if width else 0
    return [draw(st.lists(st.integers(-99, 99), min_size=width, max_size=width)) for _ in range(count)]


def _num_blocks(length: int, new_tokens: int, block_size: int) -> int:
    """Return how many blocks hold the last ``new_tokens`` of ``length`` positions."""
    if not block_size or not new_tokens:
        return 0
    return (length - 1) // block_size - (length - new_tokens) // block_size + 1


def assert_same_request(got: DraftRequest, expected: DraftRequest) -> None:
    """Compare all columns, their types and the stamps."""
    assert (got.epoch, got.step_id, got.device_step) == (expected.epoch, expected.step_id, expected.device_step)
    for name in ("rows", "starts", *RAGGED_COLUMNS):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def draft_batch(
    epoch: int, step_id: int, node_starts: Int32, tokens: Int32, parents: Int32, scores: Float32 | None = None
) -> DraftBatch:
    """Return a reply; without ``scores`` its drafter is sure of every node."""
    scores = np.zeros(len(tokens), np.float32) if scores is None else scores
    return DraftBatch(epoch, step_id, node_starts, tokens, parents, scores)
