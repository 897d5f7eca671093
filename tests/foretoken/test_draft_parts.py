"""A request in parts says the same as the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafting import ROW_COLUMNS, DraftRequest
from foretoken.transports.draft_parts import split_request
from foretoken.transports.transport import check_request
from tests.support.draft_requests import assert_same_request, draft_requests

BLOCK_SIZE = 4
WIDTH = 3
CAPACITIES = st.integers(6, 40)


def listener(parts: list[DraftRequest]) -> dict[int, dict[str, Any]]:
    """Return each batch slot's tokens, hidden states, blocks and prediction after all parts."""
    known: dict[int, dict[str, Any]] = {}
    for part in parts:
        for row, batch_slot in enumerate(part.batch_slots.tolist()):
            state = known.setdefault(batch_slot, {"tokens": {}, "hidden": {}, "blocks": {}, "prediction": []})
            tokens = part.new_tokens[slice(*part.new_token_starts[row : row + 2])].tolist()
            hidden = part.hidden[slice(*part.hidden_starts[row : row + 2])].tolist()
            blocks = part.block_ids[slice(*part.block_starts[row : row + 2])].tolist()
            length = int(part.lengths[row])
            sent = length - len(tokens)
            assert all(position not in state["tokens"] for position in range(sent, length)), "sent twice"
            state["tokens"] |= dict(zip(range(sent, length), tokens, strict=True))
            state["hidden"] |= dict(zip(range(length - len(hidden), length), hidden, strict=True))
            if tokens:
                assert len(blocks) in (0, (length - 1) // BLOCK_SIZE - sent // BLOCK_SIZE + 1)
            for place, block in enumerate(blocks, start=sent // BLOCK_SIZE):
                assert state["blocks"].setdefault(place, block) == block
            state["prediction"] += part.prediction[slice(*part.prediction_starts[row : row + 2])].tolist()
    return known


@given(draft_requests(max_tokens=60, hidden_width=WIDTH, block_size=BLOCK_SIZE), CAPACITIES)
def test_parts_tell_what_the_request_tells(request: DraftRequest, capacity: int) -> None:
    parts = split_request(request, capacity, BLOCK_SIZE)
    for part in parts:
        check_request(part, 99)
        assert len(part.new_tokens) <= capacity and len(part.prediction) <= max(capacity, 0)
        assert (part.epoch, part.step_id) == (request.epoch, request.step_id)
        assert len(part.block_ids) <= capacity + part.num_rows
    assert all((part.max_nodes == 1).all() for part in parts[:-1])
    for name in ROW_COLUMNS:
        np.testing.assert_array_equal(getattr(parts[-1], name), getattr(request, name))
    assert listener(parts) == listener([request])


@given(draft_requests(max_tokens=6, hidden_width=WIDTH, block_size=BLOCK_SIZE))
def test_a_request_that_fits_goes_as_it_is(request: DraftRequest) -> None:
    (part,) = split_request(request, 1000, BLOCK_SIZE)
    assert_same_request(part, request)
