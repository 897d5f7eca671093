"""Writes the table of operations that one compiled pass runs (see the kernels' decoder)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.linear import ADD, SILU_AND_MULTIPLY, STORE
from numpy.typing import NDArray

from foretoken.models.decoder_weights import LayerWeights

_NO_POSITION = -1


@dataclass(frozen=True, slots=True)
class Span:
    """The same ``size`` elements of every row of a buffer (a field of the kernel's table), ``stride`` apart.

    ``stride`` 0 means rows without gaps.
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
    """Widths of one decoder layer. ``qkv_features``: what the attention's first matrix takes."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_features: int

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(slots=True, eq=False)
class Program:
    """Operations over the rows of a batch, in the order in which they were added.

    Attributes:
        row_widths: by buffer, how many float32 a row takes.
        wanted_widths: the same for buffers with one row for each row whose logits are wanted.
    """

    row_widths: dict[int, int] = field(default_factory=dict)
    wanted_widths: dict[int, int] = field(default_factory=dict)
    _operations: list[list[int]] = field(default_factory=list)
    # Addresses in the table must stay good.
    _kept: list[torch.Tensor] = field(default_factory=list)

    def table(self) -> NDArray[np.int64]:
        """int64 [operations, fields]."""
        return np.array(self._operations, np.int64).reshape(-1, kernel.NUM_OPERATION_FIELDS)

    def embed(self, embedding: torch.Tensor, packed: bool, out: Span, zero_position: int = _NO_POSITION) -> None:
        """The tokens' rows of ``embedding``: [vocabulary, size] or panels; zeros for rows at ``zero_position``."""
        self._add(kernel.EMBED, None, out, zero_position, embedding, int(packed))

    def copy(self, x: Span, out: Span, rows: int = kernel.EVERY_ROW) -> None:
        self._add(kernel.COPY, x, out, rows)

    def fill(self, row: torch.Tensor, out: Span) -> None:
        self._add(kernel.FILL, None, out, kernel.EVERY_ROW, row)

    def norm(self, x: Span, weight: torch.Tensor, out: Span, rows: int = kernel.EVERY_ROW) -> None:
        self._add(kernel.NORM, x, out, rows, weight)

    def linear(self, x: Span, weight: torch.Tensor, out: Span, mode: int = STORE, rows: int = kernel.EVERY_ROW) -> None:
        """``weight``: panels from ``x.size`` to ``out.size`` features; neither span has gaps."""
        assert x.width == x.size and out.width == out.size and not x.offset and not out.offset
        self._add(kernel.LINEAR, x, out, rows, weight, mode)

    def layer(self, shape: LayerShape, weights: LayerWeights, attention: torch.Tensor) -> None:
        """One decoder layer: from its normed input in NORMED; what it adds goes to HIDDEN.

        ``attention``: the table of addresses that ROPE and ATTEND read.
        """
        hidden, normed = Span(kernel.HIDDEN, shape.hidden_size), Span(kernel.NORMED, shape.hidden_size)
        attended = Span(kernel.ATTENTION_OUT, shape.num_heads * shape.head_dim)
        gated = Span(kernel.GATED, shape.intermediate_size)
        qkv = Span(kernel.QKV_OUT, shape.qkv_size)
        self.entries(shape, weights, attention)
        self._add(kernel.ATTEND, qkv, attended, kernel.EVERY_ROW, attention)
        self.linear(attended, weights.output, hidden, ADD)
        self.norm(hidden, weights.post_attention_norm, normed)
        self.linear(normed, weights.gate_up, gated, SILU_AND_MULTIPLY)
        self.linear(gated, weights.down, hidden, ADD)

    def entries(self, shape: LayerShape, weights: LayerWeights, attention: torch.Tensor) -> None:
        """What a layer writes to the cache, from its normed input in NORMED."""
        qkv = Span(kernel.QKV_OUT, shape.qkv_size)
        self.linear(Span(kernel.NORMED, shape.qkv_features), weights.qkv, qkv)
        self._add(kernel.ROPE, qkv, qkv, kernel.EVERY_ROW, attention)

    def logits(self, head: torch.Tensor, hidden_size: int, vocab_size: int) -> None:
        """Logits of the wanted rows, which lie side by side in NORMED."""
        out = Span(kernel.LOGITS, vocab_size)
        self.linear(Span(kernel.NORMED, hidden_size), head, out, rows=kernel.WANTED)

    def _add(
        self, code: int, x: Span | None, out: Span, rows: int, weight: torch.Tensor | None = None, mode: int = 0
    ) -> None:
        size = x.size if x is not None else out.size
        operation = [0] * kernel.NUM_OPERATION_FIELDS
        for index, value in (
            (kernel.CODE, code),
            (kernel.OUT, out.buffer),
            (kernel.OUT_STRIDE, out.width),
            (kernel.OUT_OFFSET, out.offset),
            (kernel.SIZE, size),
            (kernel.ROWS, rows),
            (kernel.MODE, mode),
        ):
            operation[index] = value
        if x is not None:
            operation[kernel.X], operation[kernel.X_STRIDE], operation[kernel.X_OFFSET] = x.buffer, x.width, x.offset
            self._reserve(x)
        if weight is not None:
            operation[kernel.WEIGHT] = weight.data_ptr()
            operation[kernel.BFLOAT16] = int(weight.dtype == torch.uint16)
            self._kept.append(weight)
        self._reserve(out)
        self._operations.append(operation)

    def _reserve(self, span: Span) -> None:
        widths = self.wanted_widths if span.buffer == kernel.LOGITS else self.row_widths
        if span.buffer != kernel.GIVEN:
            widths[span.buffer] = max(widths.get(span.buffer, 0), span.width)
