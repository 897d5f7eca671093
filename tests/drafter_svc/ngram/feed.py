"""Drives an n-gram drafter by hand: one row a request, and trees as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.drafting import RAGGED_COLUMNS, ROW_COLUMNS, DraftBatch, DraftRequest, TargetInfo

VOCAB_SIZE = 100
TARGET = TargetInfo(checkpoint_hash="m", vocab_size=VOCAB_SIZE, max_model_len=200, max_batch_slots=4, max_nodes=32)
Tree = tuple[list[int], list[int]]
ROOT = [-1]
UNLIMITED = 1 << 20


def make_drafter(**changes: Any) -> NgramDrafter:
    drafter = NgramDrafter(NgramSettings(**({"capacity": 10_000} | changes)))
    drafter.attach(TARGET, None)
    return drafter


def ngram_request(
    new_tokens: Sequence[Sequence[int]], predictions: Sequence[Sequence[int]] | None = None, **columns: Sequence[int]
) -> DraftRequest:
    """Return a request with one row for each list of new tokens, in batch slots 0, 1, ...

    By default depth and branches have no limit.
    """
    rows = len(new_tokens)
    lengths = [max(len(tokens), 1) for tokens in new_tokens]
    values: dict[str, Any] = {
        "batch_slots": range(rows),
        "generations": [1] * rows,
        "lengths": lengths,
        "prompt_lengths": columns.get("lengths", lengths),
        "max_nodes": [4] * rows,
        "max_depths": [UNLIMITED] * rows,
        "max_branches": [UNLIMITED] * rows,
    } | columns
    arrays: dict[str, Any] = {
        name: np.array(values.get(name, [0] * rows), dtype) for name, dtype in ROW_COLUMNS.items()
    }
    ragged = {"new_tokens": new_tokens, "prediction": predictions or [()] * rows}
    for name, starts in RAGGED_COLUMNS.items():
        parts = ragged.get(name, [()] * rows)
        arrays[starts] = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        arrays[name] = np.array([item for part in parts for item in part], np.int32)
    arrays["hidden"] = np.zeros((0, 0), np.float32)
    return DraftRequest.of_columns(1, 1, arrays)


def trees_of(batch: DraftBatch) -> list[Tree]:
    trees = [batch.tree(row) for row in range(batch.num_rows)]
    return [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]


class Feed:
    """Sends one row at a time and counts its length.

    All tokens belong to the prompt unless ``prompt_length`` says otherwise.
    """

    def __init__(self, drafter: NgramDrafter) -> None:
        self.drafter = drafter
        self.lengths: dict[tuple[int, int], int] = {}

    def batch(
        self,
        batch_slot: int,
        tokens: list[int],
        *,
        generation: int = 1,
        salt: int = 7,
        max_nodes: int = 32,
        missed: int = 0,
        prediction: Sequence[int] = (),
        **columns: int,
    ) -> DraftBatch:
        length = self.lengths.get((batch_slot, generation), 0) + missed + len(tokens)
        self.lengths[batch_slot, generation] = length
        given = {
            "batch_slots": batch_slot,
            "generations": generation,
            "lengths": length,
            "max_nodes": max_nodes,
            "salts": salt,
        }
        request = ngram_request([tokens], [prediction], **{k: [v] for k, v in (given | columns).items()})
        return self.drafter.draft(request)

    def __call__(self, batch_slot: int, tokens: list[int], **more: Any) -> Tree:
        return trees_of(self.batch(batch_slot, tokens, **more))[0]

    def history(self, *sequences: list[int], salt: int = 7) -> None:
        """Send finished sequences, one after another, in batch slot 3."""
        for tokens in sequences:
            generation = 1 + max((g for batch_slot, g in self.lengths if batch_slot == 3), default=0)
            self(3, tokens, generation=generation, salt=salt, max_nodes=1)
