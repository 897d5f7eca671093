"""A model's forward pass as a list of operations over the rows of a batch, which a CPU or a GPU runs its own way.

Codes, buffers and modes are called as the CPU kernels' decoder calls them; see there what an operation does.
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


class Attention(NamedTuple):
    """One layer's attention: its weights, and the plane of the cache that it reads and writes."""

    plane: int
    weights: LayerWeights


class Operation(NamedTuple):
    """One operation. What is meaningless for its code is left at its default.

    Attributes:
        code: EMBED, COPY, ...
        out, x: what it writes, and what it reads.
        rows: EVERY_ROW, GATHERED or WANTED.
        weight: of EMBED, FILL, NORM and LINEAR.
        mode: of LINEAR; of EMBED, whether the embedding is in panels.
        zero_position: of EMBED: rows at this position become zeros; -1: none do.
        attention: of ROPE and ATTEND.
    """

    code: int
    out: Span
    x: Span | None = None
    rows: int = kernel.EVERY_ROW
    weight: torch.Tensor | None = None
    mode: int = 0
    zero_position: int = _NO_POSITION
    attention: Attention | None = None


@dataclass(slots=True, eq=False)
class Program:
    """Operations over the rows of a batch, in the order in which they were added.

    Attributes:
        operations: all of them.
        row_widths: by buffer, how many elements a row takes.
        wanted_widths: the same for buffers with one row for each row whose logits are wanted.
    """

    operations: list[Operation] = field(default_factory=list)
    row_widths: dict[int, int] = field(default_factory=dict)
    wanted_widths: dict[int, int] = field(default_factory=dict)

    def embed(self, embedding: torch.Tensor, packed: bool, out: Span, zero_position: int = _NO_POSITION) -> None:
        """The tokens' rows of ``embedding``: [vocabulary, size] or panels; zeros for rows at ``zero_position``."""
        self._add(Operation(kernel.EMBED, out, weight=embedding, mode=int(packed), zero_position=zero_position))

    def copy(self, x: Span, out: Span, rows: int = kernel.EVERY_ROW) -> None:
        self._add(Operation(kernel.COPY, out, x, rows))

    def fill(self, row: torch.Tensor, out: Span) -> None:
        self._add(Operation(kernel.FILL, out, weight=row))

    def norm(self, x: Span, weight: torch.Tensor, out: Span, rows: int = kernel.EVERY_ROW) -> None:
        self._add(Operation(kernel.NORM, out, x, rows, weight))

    def linear(self, x: Span, weight: torch.Tensor, out: Span, mode: int = STORE, rows: int = kernel.EVERY_ROW) -> None:
        """``weight``: from ``x.size`` to ``out.size`` features; neither span has gaps."""
        assert x.width == x.size and out.width == out.size and not x.offset and not out.offset
        self._add(Operation(kernel.LINEAR, out, x, rows, weight, mode))

    def layer(self, shape: LayerShape, attention: Attention) -> None:
        """One decoder layer: from its normed input in NORMED; what it adds goes to HIDDEN."""
        weights = attention.weights
        hidden, normed = Span(kernel.HIDDEN, shape.hidden_size), Span(kernel.NORMED, shape.hidden_size)
        attended = Span(kernel.ATTENTION_OUT, shape.num_heads * shape.head_dim)
        gated = Span(kernel.GATED, shape.intermediate_size)
        qkv = Span(kernel.QKV_OUT, shape.qkv_size)
        self.kv_entries(shape, attention)
        self._add(Operation(kernel.ATTEND, attended, qkv, attention=attention))
        self.linear(attended, weights.output, hidden, ADD)
        self.norm(hidden, weights.post_attention_norm, normed)
        self.linear(normed, weights.gate_up, gated, SILU_AND_MULTIPLY)
        self.linear(gated, weights.down, hidden, ADD)

    def kv_entries(self, shape: LayerShape, attention: Attention) -> None:
        """What a layer writes to the cache, from its normed input in NORMED."""
        qkv = Span(kernel.QKV_OUT, shape.qkv_size)
        self.linear(Span(kernel.NORMED, shape.qkv_features), attention.weights.qkv, qkv)
        self._add(Operation(kernel.ROPE, qkv, qkv, attention=attention))

    def logits(self, head: torch.Tensor, hidden_size: int, vocab_size: int) -> None:
        """Logits of the wanted rows, which lie side by side in NORMED."""
        out = Span(kernel.LOGITS, vocab_size)
        self.linear(Span(kernel.NORMED, hidden_size), head, out, rows=kernel.WANTED)

    def _add(self, operation: Operation) -> None:
        for span in (operation.x, operation.out):
            if span is not None and span.buffer != kernel.GIVEN:
                widths = self.wanted_widths if span.buffer == kernel.LOGITS else self.row_widths
                widths[span.buffer] = max(widths.get(span.buffer, 0), span.width)
        self.operations.append(operation)
