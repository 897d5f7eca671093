"""Send token masks of a step's rows to a GPU, as packed bits and for these rows alone."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np
import torch
from foretoken_kernels.sampler_state import NO_MASK

from verifier_svc.sampling.allowed_tokens import TreeMasks

# Rows of bits to have room for at first. A row takes a bit for each token of the vocabulary.
_MIN_ROWS = 32


class SentMasks(NamedTuple):
    """Masks on the device, as SampleBatch has them.

    Attributes:
        rows: int32 [rows].
        bits: int32 [capacity, words].
    """

    rows: torch.Tensor
    bits: torch.Tensor


class DeviceMasks:
    """The masks of one step at a time, at addresses that seldom change.

    Args:
        max_rows: most rows of a step.
        token_limit: ids below this one may be sampled.
    """

    def __init__(self, max_rows: int, token_limit: int, device: torch.device) -> None:
        self._device = device
        self._words = -(-token_limit // 32)
        self._is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._rows = torch.full((max_rows,), NO_MASK, dtype=torch.int32, device=device)
            self._rows_on_host = torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._is_cuda)
        self._sent: Any = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._bits, self._bits_on_host = self._new_bits(_MIN_ROWS)

    def send(self, num_rows: int, masks: Items[tuple[int, TreeMasks]]) -> SentMasks:
        """Copy masks in stream order, for launches after this. Waits for the last copy only.

        Args:
            num_rows: rows of the step.
            masks: the masks of each tree that has some, with the root's row.
        """
        if self._sent is not None:
            self._sent.synchronize()
        count = sum(len(each.bits) for _, each in masks)
        if count > len(self._bits):
            self._bits, self._bits_on_host = self._new_bits(1 << (count - 1).bit_length())
        rows, bits = self._rows_on_host.numpy()[:num_rows], self._bits_on_host.view(torch.uint8).numpy()
        rows[:] = NO_MASK
        at = 0
        for first_row, (found, of_nodes) in masks:
            width = min(found.shape[1], bits.shape[1])
            bits[at : at + len(found), :width] = found[:, :width]
            bits[at : at + len(found), width:] = 0
            rows[first_row : first_row + len(of_nodes)] = np.where(of_nodes >= 0, of_nodes + at, of_nodes)
            at += len(found)
        self._rows[:num_rows].copy_(self._rows_on_host[:num_rows], non_blocking=True)
        if count:
            self._bits[:count].copy_(self._bits_on_host[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return SentMasks(self._rows[:num_rows], self._bits)

    def _new_bits(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (rows, self._words)
        with torch.inference_mode(False):
            return (
                torch.zeros(shape, dtype=torch.int32, device=self._device),
                torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_cuda),
            )
