"""A draft model that digests what it sees, the verifier's side of requests, and plain references.

The model's output at a row is a random function of all KV entries that the row may attend to. A
wrong KV slot, position, mask, hidden state or valid range gives another tree.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from foretoken_kernels.cpu import decoder
from foretoken_kernels.cpu.draft_levels import LevelPass
from foretoken_kernels.cpu.draft_tree import MARGIN

from foretoken.drafting import DraftRequest, TargetInfo
from foretoken.models.batch import ForwardBatch
from foretoken.noise import gumbel_noise
from foretoken.sampling import SamplingParams
from tests.references.logits import process_logits

VOCAB = 50
HIDDEN = 4
WIDTH = 6
BLOCK = 4

Entry = tuple[int, int, bytes]


def target_info(**changes: object) -> TargetInfo:
    fields = {
        "checkpoint_hash": "m",
        "vocab_size": VOCAB,
        "max_model_len": 96,
        "max_batch_slots": 4,
        "max_nodes": 16,
        "hidden_size": HIDDEN,
        "num_layers": 2,
        "block_size": BLOCK,
        "num_blocks": 24,
    }
    return TargetInfo(**(fields | changes))  # type: ignore[arg-type]


def hidden_state(tokens: Sequence[int], width: int = WIDTH) -> np.ndarray:
    """Return float32 [width]: the target's hidden states at the last of these tokens."""
    return _random(repr(list(map(int, tokens))).encode()).normal(size=width).astype(np.float32)


def outputs(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 logits [VOCAB] and hidden states [HIDDEN] of a row that sees these entries."""
    random = _random(repr(list(entries)).encode())
    return (3 * random.normal(size=VOCAB)).astype(np.float32), random.normal(size=HIDDEN).astype(np.float32)


def _random(content: bytes) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


class _Output(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class DigestModel:
    """A drafter_svc.trees.passes.DraftModel that must not read a KV slot that was never written."""

    def __init__(self, num_depths: int = 1, *, reads_hidden: bool = True, target_ids: np.ndarray | None = None) -> None:
        self.num_depths = num_depths
        self.hidden_size = HIDDEN if reads_hidden else 0
        self.hidden_width = WIDTH if reads_hidden else 0
        self.target_ids = target_ids
        self.draft_vocab_size = VOCAB if target_ids is None else len(target_ids)
        self.caches: list[dict[int, Entry]] = [{} for _ in range(num_depths)]
        self.pass_sizes: list[int] = []
        self.num_entry_passes = 0
        # The room and vocabulary that it claims to have; None: as much as asked for.
        self.max_level_rows: int | None = None
        self.vocab_limit = VOCAB
        self._args = np.zeros(decoder.NUM_FIELDS, np.int64)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run_level)
        self._buffers: dict[int, np.ndarray] = {}
        # The first position that each row of the last request saw.
        self.starts: dict[int, int] = {}

    def forward(self, batch: ForwardBatch, hidden: np.ndarray, *, from_target: bool, depth: int = 0) -> _Output:
        assert hidden.shape == (batch.num_rows, self.hidden_width if from_target else self.hidden_size)
        cache, block_size = self.caches[depth], BLOCK
        for row in range(batch.num_rows):
            fed = hidden[row].tobytes() if self.hidden_size else b""
            entry = (int(batch.token_ids[row]), int(batch.positions[row]), fed)
            cache[int(batch.kv_slots[row])] = entry
        logits, hiddens = [], []
        for row in range(batch.num_rows):
            seq = int(batch.row_seqs[row])
            start = 0 if batch.context_starts is None else int(batch.context_starts[seq])
            seen = list(range(start, int(batch.context_lens[row])))
            if depth == 0:
                self.starts[seq] = start
            mask = int(batch.masks[row, 0])
            seen += [int(batch.tree_starts[seq]) + bit for bit in range(64) if mask >> bit & 1]
            table = batch.block_tables[seq]
            kv_slots = [int(table[s // block_size]) * block_size + s % block_size for s in seen]
            assert int(batch.kv_slots[row]) in kv_slots
            row_logits, row_hidden = outputs([cache[kv_slot] for kv_slot in kv_slots])
            logits.append(row_logits[: self.draft_vocab_size])
            hiddens.append(row_hidden[: self.hidden_size])
        self.pass_sizes.append(batch.num_rows)
        picked = [logits[row] for row in batch.logit_rows]
        return _Output(
            torch.from_numpy(np.array(picked, np.float32).reshape(len(picked), self.draft_vocab_size)),
            torch.from_numpy(np.array(hiddens, np.float32).reshape(batch.num_rows, self.hidden_size)),
        )

    @property
    def write_kv_entries(self) -> Callable[[ForwardBatch, np.ndarray], None] | None:
        """Return a function that writes the inputs as the only module's KV entries."""
        return self._write_kv_entries if self.num_depths == 1 and self.hidden_width else None

    def _write_kv_entries(self, batch: ForwardBatch, hidden: np.ndarray) -> None:
        assert len(batch.logit_rows) == 0
        self.num_entry_passes += 1
        self.forward(batch, hidden, from_target=True)

    def level_pass(self, num_rows: int, longest: int) -> LevelPass:
        """Return its passes for compiled code: a callback that finds its batch in the table."""
        args = self._args
        self._buffers = {
            decoder.LOGITS: np.zeros((num_rows, self.draft_vocab_size), np.float32),
            decoder.OUTPUT: np.zeros((num_rows, max(self.hidden_size, 1)), np.float32),
        }
        for index, buffer in self._buffers.items():
            args[index] = buffer.ctypes.data
        args[decoder.SCORE_STRIDE] = longest
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        limits = (self.vocab_limit, 1 << 20, 1 << 20, BLOCK)
        # The module in place of a program's address.
        programs = np.array([(module, 1) for module in range(self.num_depths)], np.int64)
        return LevelPass(
            args, programs, address, 1, decoder.OUTPUT, self.hidden_size, self.max_level_rows or num_rows, limits
        )

    def _run_level(self, _address: int) -> None:
        args = self._args
        rows, seqs = int(args[decoder.NUM_ROWS]), self._num_seqs(int(args[decoder.NUM_ROWS]))
        batch = ForwardBatch(
            token_ids=self._array(decoder.TOKEN_IDS, np.int32, rows),
            positions=self._array(decoder.POSITIONS, np.int32, rows),
            kv_slots=self._array(decoder.KV_SLOTS, np.int32, rows),
            row_seqs=self._array(decoder.ROW_SEQS, np.int32, rows),
            context_lens=self._array(decoder.CONTEXT_LENS, np.int32, rows),
            masks=self._array(decoder.MASKS, np.uint64, rows, int(args[decoder.MASK_WORDS])),
            tree_starts=self._array(decoder.TREE_STARTS, np.int32, seqs),
            block_tables=self._array(decoder.BLOCK_TABLES, np.int32, seqs, int(args[decoder.MAX_BLOCKS])),
            logit_rows=self._array(decoder.LOGIT_ROWS, np.int32, int(args[decoder.NUM_LOGIT_ROWS])),
            context_starts=self._array(decoder.CONTEXT_STARTS, np.int32, seqs),
        )
        fed = np.zeros((rows, 0), np.float32)
        if self.hidden_size:
            fed = self._array(decoder.GIVEN, np.float32, rows, self.hidden_size)
        output = self.forward(batch, fed, from_target=False, depth=int(args[decoder.OPERATIONS]))
        self._buffers[decoder.LOGITS][:rows] = output.logits.numpy()
        flat = self._buffers[decoder.OUTPUT].reshape(-1)
        flat[: rows * self.hidden_size] = output.hidden.numpy().reshape(-1)

    def _num_seqs(self, rows: int) -> int:
        return int(self._array(decoder.ROW_SEQS, np.int32, rows).max()) + 1

    def _array(self, field: int, dtype: type[Any], *shape: int) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = (ctypes.c_char * size).from_address(int(self._args[field]))
        return np.frombuffer(data, dtype).reshape(shape)


@dataclass
class Row:
    """One row of a request. ``hidden``: how many of the last new tokens come with hidden states."""

    tokens: list[int]
    new: int
    blocks: list[int]
    batch_slot: int = 0
    generation: int = 1
    hidden: int | None = None
    salt: int = 0
    max_nodes: int = 8
    max_depth: int = 3
    max_branches: int = 3
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    width: int = WIDTH

    def hidden_states(self) -> list[np.ndarray]:
        """Return the hidden states, by default of all new tokens except the sequence's first."""
        length, count = len(self.tokens), self.new if self.hidden is None else self.hidden
        return [hidden_state(self.tokens[:i], self.width) for i in range(max(length - count, 1), length)]


def request_of(rows: Sequence[Row], *, with_hidden: bool = True, step_id: int = 1) -> DraftRequest:
    def column(values: Sequence[object], kind: type) -> np.ndarray:
        return np.array(list(values), kind)

    def ragged(values: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        starts = np.cumsum([0, *map(len, values)]).astype(np.int32)
        return starts, np.array([value for part in values for value in part], np.int32)

    new_starts, new_tokens = ragged([row.tokens[len(row.tokens) - row.new :] for row in rows])
    block_starts, block_ids = ragged(
        [
            row.blocks[(len(row.tokens) - row.new) // BLOCK : -(-len(row.tokens) // BLOCK)] if row.new else []
            for row in rows
        ]
    )
    hidden = [row.hidden_states() if with_hidden else [] for row in rows]
    flat = [vector for part in hidden for vector in part]
    columns = {
        "batch_slots": column([row.batch_slot for row in rows], np.int32),
        "generations": column([row.generation for row in rows], np.int32),
        "lengths": column([len(row.tokens) for row in rows], np.int32),
        "prompt_lengths": column([len(row.tokens) for row in rows], np.int32),
        "max_nodes": column([row.max_nodes for row in rows], np.int32),
        "max_depths": column([row.max_depth for row in rows], np.int32),
        "max_branches": column([row.max_branches for row in rows], np.int32),
        "salts": column([row.salt for row in rows], np.uint64),
        "seeds": column([row.seed for row in rows], np.uint64),
        "choice_indices": column([row.choice for row in rows], np.int32),
        "temperatures": column([row.temperature for row in rows], np.float32),
        "top_ks": column([row.top_k for row in rows], np.int32),
        "top_ps": column([row.top_p for row in rows], np.float32),
        "min_ps": column([row.min_p for row in rows], np.float32),
        "new_token_starts": new_starts,
        "new_tokens": new_tokens,
        "hidden_starts": np.cumsum([0, *map(len, hidden)]).astype(np.int32),
        "hidden": np.array(flat, np.float32).reshape(len(flat), rows[0].width if with_hidden else 0),
        "block_starts": block_starts,
        "block_ids": block_ids,
        "prediction_starts": np.zeros(len(rows) + 1, np.int32),
        "prediction": np.empty(0, np.int32),
    }
    return DraftRequest.of_columns(1, step_id, columns)


@dataclass
class _Node:
    token: int
    parent: int
    depth: int
    score: float
    order: int
    # KV entries of its own branch by module, and the output that offered it.
    path: list[tuple[int, Entry]] = field(default_factory=list)
    fed: bytes = b""


def reference_tree(
    row: Row,
    valid_start: int,
    *,
    num_depths: int = 1,
    with_hidden: bool = True,
    scale: float = 0.0,
    target_ids: np.ndarray | None = None,
    model: Callable[[int, Sequence[Entry]], tuple[np.ndarray, np.ndarray]] = lambda module, entries: outputs(entries),
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and scores of EAGLE-2's tree: every beam is run, and nothing is paged.

    Args:
        scale: 0 without the sampler's noise.
        model: returns logits and hidden of the last entry, which sees all others.
    """
    tokens, length = row.tokens, len(row.tokens)
    memo: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def entry(module: int, i: int) -> Entry:
        if not with_hidden:
            return tokens[i], i, b""
        fed = hidden_state(tokens[:i], row.width) if module == 0 else output(module - 1, i - 1)[1]
        return tokens[i], i, fed.tobytes()

    def output(module: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        if (module, i) not in memo:
            memo[module, i] = model(module, [entry(module, k) for k in range(valid_start + module, i + 1)])
        return memo[module, i]

    candidates: list[_Node] = []

    def offer(parent: int, logits: np.ndarray, hidden: np.ndarray) -> list[int]:
        depth = 1 if parent < 0 else candidates[parent].depth + 1
        ids = np.arange(len(logits)) if target_ids is None else target_ids
        values, factor = logits[: len(ids)], 1.0
        if row.temperature > 0:
            params = SamplingParams(
                temperature=row.temperature, top_k=row.top_k, top_p=np.float32(row.top_p), min_p=np.float32(row.min_p)
            )
            values = process_logits(values, params, prompt_ids=[], output_ids=[])
            if scale:
                values = values + gumbel_noise(row.seed, length + depth - 1, row.choice, ids)
                factor = row.temperature / scale
                values = np.where(values < values.max() - np.float32(MARGIN / factor), -np.inf, values)
        scaled = values.astype(np.float64) * factor
        scores = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        best = sorted((i for i in range(len(ids)) if values[i] > -np.inf), key=lambda i: (-values[i], i))
        above = 0.0 if parent < 0 else candidates[parent].score
        added = []
        for i in best[: row.max_branches]:
            node = _Node(int(ids[i]), parent, depth, above + min(float(scores[i]), 0.0), len(candidates))
            node.path = [] if parent < 0 else candidates[parent].path
            node.fed = hidden.tobytes() if with_hidden else b""
            added.append(len(candidates))
            candidates.append(node)
        return added

    def rank(index: int) -> tuple[float, int]:
        return -candidates[index].score, index

    level = offer(-1, *output(0, length - 1))
    for depth in range(1, min(row.max_depth, row.max_nodes - 1)):
        next_level = []
        for index in sorted(level, key=rank)[: row.max_branches]:
            node, module = candidates[index], min(depth, num_depths - 1)
            node.path = [*node.path, (module, (node.token, length - 1 + depth, node.fed))]
            seen = [entry(module, k) for k in range(valid_start + module, length)]
            seen += [own for of, own in node.path if of == module]
            next_level += offer(index, *model(module, seen))
        level = next_level
    chosen = sorted(sorted(range(len(candidates)), key=rank)[: row.max_nodes - 1])
    places = {-1: 0} | {index: place + 1 for place, index in enumerate(chosen)}
    return (
        [tokens[-1], *(candidates[i].token for i in chosen)],
        [-1, *(places[candidates[i].parent] for i in chosen)],
        [0.0, *(candidates[i].score for i in chosen)],
    )


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]
