"""A model's forward pass as a list of operations over the rows of a batch.

CPU and GPU each run it their own way.

Codes, buffers and modes have the names of foretoken_kernels.cpu.decoder, which says what each
operation does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.linear import ADD, SILU_AND_MULTIPLY, STORE

from foretoken.models.decoder_weights import LayerWeights

_NO_POSITION = -1


@dataclass(frozen=True, slots=True)
class Columns:
    """The same ``size`` columns, from ``offset`` on, of every row of a buffer.

    Rows are ``stride`` elements apart; 0: there are no gaps. ``buffer`` is a field of the kernel's
    table.
    """

    buffer: int
    size: int
    offset: int = 0
    stride: int = 0

    @property
    def width(self) -> int:
        return self.stride or self.size


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Widths of one decoder layer. ``qkv_features``: input size of the attention's first matrix."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_features: int

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Attention(NamedTuple):
    """One layer's attention: its weights, and its layer of the KV cache.

    It reads and writes that layer.
    """

    plane: int
    weights: LayerWeights


class Operation(NamedTuple):
    """One operation. Fields that its code does not use keep their defaults.

    Attributes:
        code: EMBED, COPY, ...
        out, x: the columns that it writes and reads.
        rows: EVERY_ROW, GATHERED or WANTED. ATTEND has all rows; WANTED: unless none is wanted.
        weight: for EMBED, FILL, NORM and LINEAR.
        mode: for LINEAR; for EMBED, whether the embedding is in panels.
        zero_position: for EMBED: rows at this position become zeros; -1: no row does.
        attention: for ROPE and ATTEND.
    """

    code: int
    out: Columns
    x: Columns | None = None
    rows: int = kernel.EVERY_ROW
    weight: torch.Tensor | None = None
    mode: int = 0
    zero_position: int = _NO_POSITION
    attention: Attention | None = None


@dataclass(slots=True, eq=False)
class Program:
    """Operations over the rows of a batch, in the order in which they were added.

    Attributes:
        row_widths: elements of a row, by buffer.
        wanted_widths: the same for rows whose logits are wanted, in
            buffers that have these side by side.
    """

    operations: list[Operation] = field(default_factory=list)
    row_widths: dict[int, int] = field(default_factory=dict)
    wanted_widths: dict[int, int] = field(default_factory=dict)

    def embed(self, embedding: torch.Tensor, packed: bool, out: Columns, zero_position: int = _NO_POSITION) -> None:
        """Look up the tokens in ``embedding``, [vocabulary, size] or panels.

        Rows at ``zero_position`` become zeros.
        """
        self._add(Operation(kernel.EMBED, out, weight=embedding, mode=int(packed), zero_position=zero_position))

    def copy(self, x: Columns, out: Columns, rows: int = kernel.EVERY_ROW) -> None:
        self._add(Operation(kernel.COPY, out, x, rows))

    def fill(self, row: torch.Tensor, out: Columns) -> None:
        self._add(Operation(kernel.FILL, out, weight=row))

    def norm(self, x: Columns, weight: torch.Tensor, out: Columns, rows: int = kernel.EVERY_ROW) -> None:
        self._add(Operation(kernel.NORM, out, x, rows, weight))

    def linear(
        self, x: Columns, weight: torch.Tensor, out: Columns, mode: int = STORE, rows: int = kernel.EVERY_ROW
    ) -> None:
        """Multiply by ``weight``, from ``x.size`` to ``out.size`` features, neither with gaps."""
        assert x.width == x.size and out.width == out.size and not x.offset and not out.offset
        self._add(Operation(kernel.LINEAR, out, x, rows, weight, mode))

    def layer(self, shape: LayerShape, attention: Attention) -> None:
        """Add a decoder layer's output to HIDDEN; its normed input is in NORMED."""
        weights = attention.weights
        hidden, normed = Columns(kernel.HIDDEN, shape.hidden_size), Columns(kernel.NORMED, shape.hidden_size)
        attended = Columns(kernel.ATTENTION_OUT, shape.num_heads * shape.head_dim)
        gated = Columns(kernel.GATED, shape.intermediate_size)
        qkv = Columns(kernel.QKV_OUT, shape.qkv_size)
        self.kv_entries(shape, attention)
        self._add(Operation(kernel.ATTEND, attended, qkv, attention=attention))
        self.linear(attended, weights.output, hidden, ADD)
        self.norm(hidden, weights.post_attention_norm, normed)
        self.linear(normed, weights.gate_up, gated, SILU_AND_MULTIPLY)
        self.linear(gated, weights.down, hidden, ADD)

    def last_layer(self, shape: LayerShape, attention: Attention) -> None:
        """Add a layer's KV entries of all rows, and its output of the wanted rows.

        The output is side by side in OUTPUT.

        Its input is in HIDDEN, and normed in NORMED.
        """
        weights = attention.weights
        attended = Columns(kernel.ATTENTION_OUT, shape.num_heads * shape.head_dim)
        gathered = Columns(kernel.NORMED, attended.size)
        normed, gated = Columns(kernel.NORMED, shape.hidden_size), Columns(kernel.GATED, shape.intermediate_size)
        out = Columns(kernel.OUTPUT, shape.hidden_size)
        self.kv_entries(shape, attention)
        qkv = Columns(kernel.QKV_OUT, shape.qkv_size)
        self._add(Operation(kernel.ATTEND, attended, qkv, kernel.WANTED, attention=attention))
        self.copy(attended, gathered, kernel.GATHERED)
        self.copy(Columns(kernel.HIDDEN, shape.hidden_size), out, kernel.GATHERED)
        self.linear(gathered, weights.output, out, ADD, kernel.WANTED)
        self.norm(out, weights.post_attention_norm, normed, kernel.WANTED)
        self.linear(normed, weights.gate_up, gated, SILU_AND_MULTIPLY, kernel.WANTED)
        self.linear(gated, weights.down, out, ADD, kernel.WANTED)

    def kv_entries(self, shape: LayerShape, attention: Attention) -> None:
        """Write a layer's KV entries; its normed input is in NORMED."""
        qkv = Columns(kernel.QKV_OUT, shape.qkv_size)
        self.linear(Columns(kernel.NORMED, shape.qkv_features), attention.weights.qkv, qkv)
        self._add(Operation(kernel.ROPE, qkv, qkv, attention=attention))

    def logits(self, head: torch.Tensor, hidden_size: int, vocab_size: int) -> None:
        """Compute the logits of the wanted rows, which are the first rows of NORMED."""
        out = Columns(kernel.LOGITS, vocab_size)
        self.linear(Columns(kernel.NORMED, hidden_size), head, out, rows=kernel.WANTED)

    def _add(self, operation: Operation) -> None:
        for columns in (operation.x, operation.out):
            if columns is not None and columns.buffer != kernel.GIVEN:
                is_gathered = operation.rows == kernel.GATHERED and columns is operation.x
                has_all = operation.rows == kernel.EVERY_ROW or operation.attention is not None or is_gathered
                widths = self.row_widths if has_all else self.wanted_widths
                widths[columns.buffer] = max(widths.get(columns.buffer, 0), columns.width)
        self.operations.append(operation)
