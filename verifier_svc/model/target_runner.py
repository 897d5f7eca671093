"""Declare the interface of the target model that a step needs, on any device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from foretoken.models.batch import ForwardBatch


class TargetRunner(Protocol):
    """Runs the target model over flat batches and moves its KV entries."""

    @property
    def hidden_states(self) -> torch.Tensor:
        """Return the last pass's hidden states, [rows, captured * hidden_size].

        They are on the model's device and valid until the next call.
        """
        ...

    def fetch_hidden_states(self, rows: list[int]) -> np.ndarray:
        """Fetch these rows of ``hidden_states``, float32 [len(rows), captured * hidden_size]."""
        ...

    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        """Run a batch and return raw logits, float32 [wanted rows, vocab], on the model's device.

        They are valid until the next call. KV slots after the last block are scratch: rows may
        write KV entries there that nobody reads.

        ``captured_layers``: layers whose hidden states to capture for all rows
        (foretoken.drafting.FINAL_NORM).
        """
        ...

    def commit(self, source_kv_slots: np.ndarray, target_kv_slots: np.ndarray) -> None:
        """Copy KV entries from ``source_kv_slots`` to ``target_kv_slots`` one by one, in order."""
        ...
