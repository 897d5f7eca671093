"""A target "model" whose logits are a hash of exactly the KV entries that a row can see.

It keeps token and position in a cache by KV slot, as a real model keeps keys and values. A wrong
KV slot, mask, position, shared block or skipped compaction changes the hash and with it the text.
It takes microseconds a row.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.models.batch import ForwardBatch

UNWRITTEN = -7
HIDDEN_SIZE = 4


class HashTarget:
    """Implements verifier_svc.model.target_runner.TargetRunner.

    Logits are spread so that sampling has choices.
    """

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int, *, spread: float = 4.0) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._spread = spread
        # One more block: scratch.
        self._num_kv_slots = num_blocks * block_size
        self._tokens = np.full(self._num_kv_slots + block_size, UNWRITTEN, np.int64)
        self._positions = np.full(self._num_kv_slots + block_size, UNWRITTEN, np.int64)
        self._kept = np.empty((0, 0), np.float32)
        # For each pass: its rows, and the hidden states that it captured.
        self.num_rows: list[int] = []
        self.captured: list[tuple[int, ...]] = []

    def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
        self.num_rows.append(batch.num_rows)
        self.captured.append(captured_layers)
        kept = batch.kv_slots[batch.kv_slots < self._num_kv_slots]
        assert len(np.unique(kept)) == len(kept), "two rows write one KV slot"
        self._tokens[batch.kv_slots] = batch.token_ids
        self._positions[batch.kv_slots] = batch.positions
        out = np.stack([self._logits(batch, int(row)) for row in batch.logit_rows]) if len(batch.logit_rows) else None
        # What an earlier pass captured is gone.
        self._kept.fill(np.nan)
        if captured_layers:
            rows = [self._hidden_states(batch, row, captured_layers) for row in range(batch.num_rows)]
            self._kept = np.array(rows, np.float32)
        if out is None:
            return torch.empty(0, self._vocab_size)
        return torch.from_numpy(out)

    def commit(self, source_kv_slots: NDArray[np.int32], target_kv_slots: NDArray[np.int32]) -> None:
        for source, target in zip(source_kv_slots, target_kv_slots, strict=True):
            self._tokens[target] = self._tokens[source]
            self._positions[target] = self._positions[source]

    @property
    def hidden_states(self) -> torch.Tensor:
        return torch.from_numpy(self._kept)

    def fetch_hidden_states(self, rows: list[int]) -> NDArray[np.float32]:
        return self._kept[rows]

    def _hidden_states(self, batch: ForwardBatch, row: int, captured_layers: tuple[int, ...]) -> list[int]:
        """Return HIDDEN_SIZE numbers for each hidden state asked for; see ``hidden_state_of``."""
        return [value for state in captured_layers for value in hidden_state_of(self._path(batch, row).tolist(), state)]

    def _logits(self, batch: ForwardBatch, row: int) -> NDArray[np.float32]:
        state = zlib.crc32(self._path(batch, row).tobytes())
        mixed = (np.arange(1, self._vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ (
            np.uint64(state * 0xBF58476D1CE4E5B9 % 2**64)
        )
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        return ((mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24) * np.float32(self._spread)).astype(
            np.float32
        )

    def _path(self, batch: ForwardBatch, row: int) -> NDArray[np.int64]:
        """Return int64: the tokens of the KV entries that a row sees, in order."""
        seq = batch.row_seqs[row]
        logical = list(range(batch.context_lens[row]))
        for word, bits in enumerate(batch.masks[row]):
            logical += [int(batch.tree_starts[seq]) + 64 * word + bit for bit in range(64) if int(bits) >> bit & 1]
        at = np.array(logical)
        kv_slots = batch.block_tables[seq, at // self._block_size] * self._block_size + at % self._block_size
        tokens, positions = self._tokens[kv_slots], self._positions[kv_slots]
        assert (positions == np.arange(len(at))).all(), "a row sees an entry of another position"
        return tokens


def hidden_state_of(path: list[int], state: int) -> list[int]:
    """Return HashTarget's hidden state ``state`` of a row that sees the tokens ``path``.

    It is HIDDEN_SIZE numbers that float32 holds exactly.
    """
    digest = zlib.crc32(np.array([*path, state], np.int64).tobytes())
    return [len(path), digest & 0xFFFF, digest >> 16, path[-1]]
