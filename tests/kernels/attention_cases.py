"""Make batches for the GPU's attention kernels, and compute their expected results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.tree_attention import Workspace, attention_workspace, tree_attention

from foretoken.tree import ancestor_mask

Heads = tuple[int, int, int]
# tree_attention, or a function with the same arguments.
Attention = Callable[..., None]


@dataclass
class Case:
    """A batch over a cache: unseen KV slots are NaN, unused block table entries are garbage."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    row_starts: torch.Tensor
    context_lens: torch.Tensor
    masks: torch.Tensor
    tree_starts: torch.Tensor
    block_tables: torch.Tensor
    context_starts: torch.Tensor
    block_size: int
    max_seq_rows: int
    kernel: Attention = tree_attention

    def attend(self, workspace: Workspace | None = None) -> torch.Tensor:
        """Run a kernel on the case. Padding rows keep the NaN that ``out`` begins with."""
        rows, num_heads, head_dim = self.query.shape
        if workspace is None:
            # The interpreter runs programs one after the other: splits without work would take
            # minutes.
            num_splits = 32 if self.query.is_cuda else 4
            heads = (num_heads, self.keys.shape[1], head_dim)
            workspace = attention_workspace(rows, *heads, self.query.device, num_splits)
        wide = torch.full((rows, num_heads + 1, head_dim), torch.nan, dtype=self.query.dtype, device=self.query.device)
        out = wide[:, :num_heads]
        self.kernel(
            self.query,
            self.keys,
            self.values,
            self.row_starts,
            self.context_lens,
            self.masks,
            self.tree_starts,
            self.block_tables,
            self.context_starts,
            self.block_size,
            self.max_seq_rows,
            workspace,
            out,
        )
        assert not workspace.arrived.any()
        assert wide[:, num_heads:].isnan().all()
        return out

    def defined_of(self, seq: int) -> torch.Tensor:
        """Return one sequence's expected rows in float32, computed at once on the tensors' device.

        ``defined`` computes one row at a time: thousands of rows over long contexts would take
        minutes. Every row must see a KV slot, and trees must not begin before the context.
        """
        first, end = self.row_starts[seq : seq + 2].tolist()
        lens, masks = self.context_lens[first:end], self.masks[first:end]
        tree_start, context_start = int(self.tree_starts[seq]), int(self.context_starts[seq])
        most = max(int(lens.max()), tree_start + 64 * masks.shape[1])
        logical = torch.arange(context_start, most, device=lens.device)
        index = (logical - tree_start).clamp(0, 64 * masks.shape[1] - 1)
        on_path = (masks[:, index // 64] >> (index % 64)) & 1 != 0
        visible = torch.where(logical < tree_start, False, on_path) | (logical < lens[:, None])
        seen = visible.any(0)
        logical, visible = logical[seen], visible[:, seen]
        kv_slots = (
            self.block_tables[seq, logical // self.block_size].long() * self.block_size + logical % self.block_size
        )
        keys, values = (plane[kv_slots].float().transpose(0, 1) for plane in (self.keys, self.values))
        # [key heads, rows * query heads of one, head_dim]
        query = self.query[first:end].float().unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        scores = (query @ keys.mT * query.shape[2] ** -0.5).unflatten(1, (end - first, -1))
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).flatten(1, 2)
        return (weights @ values).unflatten(1, (end - first, -1)).transpose(0, 1).flatten(1, 2)

    def defined(self) -> torch.Tensor:
        """Return the expected rows in float64, without padding."""
        counts = self.row_starts.cpu().diff()
        rows = int(self.row_starts[-1])
        return reference.tree_attention(
            self.query[:rows].double(),
            self.keys,
            self.values,
            torch.arange(len(counts)).repeat_interleave(counts),
            self.context_lens.cpu(),
            self.masks.cpu(),
            self.tree_starts.cpu(),
            self.block_tables.cpu(),
            self.block_size,
            self.context_starts.cpu(),
        )


@dataclass
class Rows:
    """One sequence of a case: rows of (context_len, mask as a Python int)."""

    rows: list[tuple[int, int]]
    tree_start: int = 0
    context_start: int = 0


def prefill(start: int, length: int, context_start: int = 0) -> Rows:
    return Rows([(start + i + 1, 0) for i in range(length)], start, context_start)


def tree(root: int, nodes: int, generator: np.random.Generator, context_start: int = 0) -> Rows:
    """Return a random tree after ``root`` tokens; its root is a node like the others."""
    parents = np.array([-1] + [generator.integers(0, i) for i in range(1, nodes)], np.int32)
    masks = [sum(int(word) << 64 * i for i, word in enumerate(words)) for words in ancestor_mask(parents)]
    return Rows([(root, mask) for mask in masks], root, context_start)


def rooted(rows: Rows) -> Rows:
    """Return the same tree with its root in the context: bit 0 is then clear."""
    return replace(rows, rows=[(context + 1, mask & ~1) for context, mask in rows.rows])


def case(  # noqa: PLR0913 - a kernel's arguments
    seqs: list[Rows],
    heads: Heads,
    block_size: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    words: int = 1,
    padding: int = 0,
    seed: int = 0,
    slack: int = 3,
    kernel: Attention = tree_attention,
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator(device).manual_seed(seed)

    def integers(data: list[int]) -> torch.Tensor:
        return torch.tensor(data, dtype=torch.int32, device=device)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    used = []
    for rows in seqs:
        kv_slots = set(range(rows.context_start, max(context for context, _ in rows.rows)))
        for _, mask in rows.rows:
            kv_slots |= {rows.tree_start + i for i in range(mask.bit_length()) if mask >> i & 1}
        used.append(sorted(kv_slots))
    blocks = [max(kv_slots, default=-1) // block_size + 1 for kv_slots in used]
    total = sum(blocks) + slack
    order = torch.randperm(total, generator=generator, device=device)
    tables = torch.full((len(seqs), max(blocks) + 2), 2**31 - 1, device=device)
    keys, values = torch.full((2, total * block_size, num_kv_heads, head_dim), torch.nan, device=device)
    taken = 0
    for seq, (kv_slots, count) in enumerate(zip(used, blocks, strict=True)):
        tables[seq, :count] = order[taken : taken + count]
        taken += count
        logical = torch.tensor(kv_slots, dtype=torch.int64, device=device)
        where = tables[seq, logical // block_size] * block_size + logical % block_size
        keys[where] = noise(len(kv_slots), num_kv_heads, head_dim)
        values[where] = noise(len(kv_slots), num_kv_heads, head_dim)
    rows = sum(len(s.rows) for s in seqs)
    # A view into wider rows, as queries are a view into the product with the stacked weights.
    wide = noise(rows + padding, num_heads + 2 * num_kv_heads, head_dim)
    bits = np.array([[m >> 64 * i & 2**64 - 1 for i in range(words)] for s in seqs for _, m in s.rows], np.uint64)
    lens = [context for s in seqs for context, _ in s.rows]
    return Case(
        (2 * wide).to(dtype)[:, :num_heads],
        keys.to(dtype),
        values.to(dtype),
        integers(np.cumsum([0, *(len(s.rows) for s in seqs)]).tolist()),
        integers(lens + [2**31 - 1] * padding),
        torch.from_numpy(np.pad(bits.view(np.int64), ((0, padding), (0, 0)), constant_values=-1)).to(device),
        integers([s.tree_start for s in seqs]),
        tables.int(),
        integers([s.context_start for s in seqs]),
        block_size,
        max(len(s.rows) for s in seqs),
        kernel,
    )


def assert_defined(batch: Case, workspace: Workspace | None = None) -> torch.Tensor:
    out, expected = batch.attend(workspace), batch.defined()
    rows = len(expected)
    assert out[rows:].isnan().all()
    found = out[:rows].double()
    if batch.query.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert found.isfinite().all()
        error = (found - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < (5e-3 if batch.query.dtype == torch.bfloat16 else 1e-3)
    return out[:rows]


def ragged(generator: np.random.Generator) -> list[Rows]:
    return [
        prefill(11, 9),
        Rows([(38, 0)], 38),
        tree(70, 13, generator, context_start=21),
        rooted(tree(33, 5, generator)),
        prefill(0, 1),
        replace(prefill(40, 3, context_start=39), tree_start=0),
    ]
