"""Which trees of a reply a verifier may run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretoken import drafting
from foretoken.drafting import DraftBatch

ROOT, VOCAB = 5, 10
Tree = tuple[list[int], list[int]]
SOUND: Tree = ([ROOT, 1, 2], [-1, 0, 1])


@pytest.fixture(autouse=True, params=[0, 100])
def _few_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at all nodes as arrays, or one by one."""
    monkeypatch.setattr(drafting, "FEW_NODES", request.param)


def batch_of(trees: list[Tree]) -> DraftBatch:
    """Return a reply with these trees, as tokens and parents."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in trees)]).astype(np.int32)
    tokens = np.array([token for tokens, _ in trees for token in tokens], np.int32)
    parents = np.array([parent for _, parents in trees for parent in parents], np.int32)
    return DraftBatch(1, 1, starts, tokens, parents, np.zeros(len(tokens), np.float32))


def are_sound(batch: DraftBatch) -> list[bool]:
    found: list[bool] = batch.are_sound(np.full(batch.num_rows, ROOT, np.int32), VOCAB).tolist()
    return found


@pytest.mark.parametrize(
    "tokens, parents, is_sound",
    [
        ([5], [-1], True),
        ([5, 0, 9], [-1, 0, 0], True),
        ([5, 1, 1], [-1, 0, 1], True),
        ([4], [-1], False),  # another root
        ([5], [0], False),  # a root with a parent
        ([5], [-2], False),
        ([5, 1], [-1, 1], False),  # its own parent
        ([5, 1, 2], [-1, 2, 0], False),  # a parent after it
        ([5, 1], [-1, -1], False),  # two roots
        ([5, 10], [-1, 0], False),  # no token of the model
        ([5, -1], [-1, 0], False),
    ],
)
def test_ids_and_parents(tokens: list[int], parents: list[int], is_sound: bool) -> None:
    """Other trees of the same reply make no difference."""
    assert are_sound(batch_of([(tokens, parents)])) == [is_sound]
    assert are_sound(batch_of([SOUND, (tokens, parents), SOUND])) == [True, is_sound, True]


def test_a_score_that_is_no_number() -> None:
    batch = batch_of([SOUND, SOUND])
    batch.scores[4] = math.nan
    assert are_sound(batch) == [True, False]


def test_a_reply_without_rows() -> None:
    assert are_sound(batch_of([])) == []
