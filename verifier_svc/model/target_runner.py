"""What a step needs of the target model, on whatever device it runs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch


class TargetRunner(Protocol):
    """Runs the target model over flat batches and moves its cache entries."""

    @property
    def features(self) -> torch.Tensor:
        """[rows, captured * hidden_size] of the last pass, on the model's device; valid until the next call."""
        ...

    def feature_rows(self, rows: list[int]) -> np.ndarray:
        """float32 [len(rows), captured * hidden_size] of the last pass: a copy, on the host."""
        ...

    def forward(self, batch: ForwardBatch, features: tuple[int, ...] = ()) -> torch.Tensor:
        """float32 [wanted rows, vocab]: raw logits, on the model's device, valid until the next call.

        ``features``: hidden states to capture for all rows; see foretoken.drafting.FINAL_NORM. Slots from the last
        block's end on are scratch: a row may write there what nobody reads.
        """
        ...

    def commit(self, source_slots: np.ndarray, target_slots: np.ndarray) -> None:
        """Copy cache entries, slot by slot, in order."""
        ...
