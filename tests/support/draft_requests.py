"""Draft requests for tests: literal ones by keyword, and random ones by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from foretoken.drafting import DraftRequest

UINT64 = st.integers(0, 2**64 - 1)
INT31 = st.integers(0, 2**31 - 1)


def draft_request(
    new_tokens: Sequence[Sequence[int]], *, epoch: int = 1, step_id: int = 1, **columns: Sequence[Any]
) -> DraftRequest:
    """One row for each list of new tokens, in slots 0, 1, ...; other columns as given, or plain defaults."""
    rows = len(new_tokens)
    lengths = [max(len(tokens), 1) for tokens in new_tokens]
    defaults: dict[str, tuple[Sequence[Any], type[Any]]] = {
        "slots": (range(rows), np.int32),
        "generations": ([1] * rows, np.int32),
        "lengths": (lengths, np.int32),
        "prompt_lengths": (lengths, np.int32),
        "max_nodes": ([4] * rows, np.int32),
        "salts": ([0] * rows, np.uint64),
        "seeds": ([0] * rows, np.uint64),
        "choice_indices": ([0] * rows, np.int32),
        "temperatures": ([0.0] * rows, np.float32),
    }
    arrays = {name: np.array(columns.get(name, value), dtype) for name, (value, dtype) in defaults.items()}
    return DraftRequest(
        epoch=epoch,
        step_id=step_id,
        new_token_starts=np.cumsum([0, *map(len, new_tokens)]).astype(np.int32),
        new_tokens=np.array([token for tokens in new_tokens for token in tokens], np.int32),
        **arrays,
    )


@st.composite
def draft_requests(draw: st.DrawFn, *, max_rows: int = 6, max_nodes: int = 16, max_tokens: int = 20) -> DraftRequest:
    """Any values that fit the columns, each row in its own slot."""
    rows = draw(st.integers(1, max_rows))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    new_tokens = column(st.lists(INT31, min_size=0, max_size=max_tokens))
    lengths = [len(tokens) + before for tokens, before in zip(new_tokens, column(st.integers(0, 999)), strict=True)]
    return draft_request(
        new_tokens,
        epoch=draw(UINT64),
        step_id=draw(st.integers(1, 2**64 - 1)),
        slots=draw(st.permutations(range(max_rows)))[:rows],
        generations=column(INT31),
        lengths=lengths,
        prompt_lengths=column(INT31),
        max_nodes=column(st.integers(1, max_nodes)),
        salts=column(UINT64),
        seeds=column(UINT64),
        choice_indices=column(INT31),
        temperatures=column(st.floats(0, 2, width=32)),
    )


def assert_same_request(got: DraftRequest, expected: DraftRequest) -> None:
    """All columns, their types and the stamps."""
    assert (got.epoch, got.step_id) == (expected.epoch, expected.step_id)
    for name in DraftRequest.__slots__[2:]:
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
