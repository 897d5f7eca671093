"""Device memory that a verifier and a drafter on one GPU share.

They exchange a step's results and the next trees in it.

When steps overlap, the host does not know what step n committed when it asks for the trees of step
n + 1: both are in this memory. Each part has one writer. ``stamp`` and ``draft_stamp`` are written
after the data that they mark, in stream order. A part whose stamp differs from the expected number
belongs to another step or is incomplete, and is not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Each array begins at a multiple of this, as vector loads need.
_ALIGNMENT = 256


class OverlapLayout(NamedTuple):
    """Sizes of an OverlapMemory.

    Attributes:
        batch_rows: sequences of one step at most.
        tokens: tokens that one step commits for one sequence at most.
        nodes: nodes of one tree at most, including the root.
        hidden_width: elements of the target's hidden states for each token; 0: there are none.
        hidden_dtype: their element type.
        prompt_rows: rows of hidden states that one step's prompts
            leave at most; 0: they leave none.
    """

    batch_rows: int
    tokens: int
    nodes: int
    hidden_width: int
    hidden_dtype: torch.dtype
    prompt_rows: int = 0

    @property
    def num_bytes(self) -> int:
        return _spans(self)[1]


class OverlapMemory(NamedTuple):
    """Views of one allocation; int32 unless said otherwise.

    ``batch_rows`` and ``tokens`` are the layout's.

    The verifier writes ``stamp`` to ``prompt_hidden``, the drafter ``draft_stamp`` to
    ``draft_scores``.

    Attributes:
        stamp: [1]; number of the step with these results.
        counts: [batch_rows]; tokens that the step committed; 0 for an empty batch row.
        lengths: [batch_rows]; length of the sequence including them.
        num_left: [batch_rows]; tokens that it may still emit; 0 if it has ended or the batch row is
            empty.
        new_tokens: [batch_rows, tokens]; the first ``counts`` of each row are valid.
        hidden: ``hidden_dtype`` [batch_rows * tokens, hidden_width]; row ``batch_row * tokens + j``
            is the hidden state of the position before ``new_tokens[batch_row, j]``.
        prompt_hidden: ``hidden_dtype`` [2 * prompt_rows, hidden_width]; hidden states of prompts,
            by turns in the first and in the second half. A half is written again two drafts later.
        draft_stamp: [1]; number of the step after which these trees grow.
        num_nodes: [batch_rows].
        draft_tokens, draft_parents: [batch_rows, nodes]; the root comes first, its parent is -1.
        draft_scores: float32 [batch_rows, nodes]; see DraftBatch.scores.
        results: uint8; the memory from ``counts`` to ``new_tokens``, for one copy of all.
        drafts: uint8; the memory from ``num_nodes`` to ``draft_scores``, for one copy of all.
    """

    layout: OverlapLayout
    stamp: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    num_left: torch.Tensor
    new_tokens: torch.Tensor
    hidden: torch.Tensor
    prompt_hidden: torch.Tensor
    draft_stamp: torch.Tensor
    num_nodes: torch.Tensor
    draft_tokens: torch.Tensor
    draft_parents: torch.Tensor
    draft_scores: torch.Tensor
    results: torch.Tensor
    drafts: torch.Tensor

    @staticmethod
    def over(memory: torch.Tensor, layout: OverlapLayout) -> OverlapMemory:
        """Return views of ``memory``, uint8 [layout.num_bytes or more], zeroed by its maker.

        Raises ValueError if it is too small.
        """
        spans, size = _spans(layout)
        if memory.dtype != torch.uint8 or memory.numel() < size:
            raise ValueError(f"the overlap memory has {memory.numel()} bytes, its layout needs {size}")
        views = {
            name: memory[low : low + num_bytes].view(dtype).view(shape)
            for name, (low, num_bytes, shape, dtype) in spans.items()
        }
        low, middle, high = (spans[name][0] for name in ("counts", "hidden", "num_nodes"))
        return OverlapMemory(layout, **views, results=memory[low:middle], drafts=memory[high:size])

    @staticmethod
    def mirror(layout: OverlapLayout, *, pinned: bool) -> OverlapMemory:
        """Make a copy on the host, without hidden states.

        ``results`` and ``drafts`` have the same layout.
        """
        small = layout._replace(hidden_width=0)
        with torch.inference_mode(False):
            return OverlapMemory.over(torch.zeros(small.num_bytes, dtype=torch.uint8, pin_memory=pinned), small)


def _spans(layout: OverlapLayout) -> tuple[dict[str, tuple[int, int, tuple[int, ...], torch.dtype]], int]:
    """Return offset, bytes, shape and element type of each array, and the bytes of all."""
    batch_rows, tokens, nodes, width, hidden_dtype, prompt_rows = layout
    arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "stamp": ((1,), torch.int32),
        "counts": ((batch_rows,), torch.int32),
        "lengths": ((batch_rows,), torch.int32),
        "num_left": ((batch_rows,), torch.int32),
        "new_tokens": ((batch_rows, tokens), torch.int32),
        "hidden": ((batch_rows * tokens, width), hidden_dtype),
        "prompt_hidden": ((2 * prompt_rows, width), hidden_dtype),
        "draft_stamp": ((1,), torch.int32),
        "num_nodes": ((batch_rows,), torch.int32),
        "draft_tokens": ((batch_rows, nodes), torch.int32),
        "draft_parents": ((batch_rows, nodes), torch.int32),
        "draft_scores": ((batch_rows, nodes), torch.float32),
    }
    spans = {}
    size = 0
    for name, (shape, dtype) in arrays.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        spans[name] = (size, num_bytes, shape, dtype)
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return spans, size


class StreamOrder:
    """Order between the work of two sides on one GPU.

    This class is for sides that share a stream, and does nothing.

    Numbers grow. Work that a side launched before ``signal_...`` finishes before work begins that
    the other side launched after ``await_...`` of the same or a smaller number.
    """

    def signal_step(self, number: int) -> None:
        """Signal in the verifier's stream that the memory holds the results of step ``number``."""

    def await_step(self, number: int) -> None:
        """Wait for ``signal_step`` in the drafter's stream."""

    def signal_draft(self, number: int) -> None:
        """Signal in the drafter's stream that the memory holds the trees after step ``number``."""

    def await_draft(self, number: int) -> None:
        """Wait for ``signal_draft`` in the verifier's stream."""

    def release_draft(self, number: int) -> None:
        """Let the verifier's stream continue after ``await_draft(number)``.

        The drafter need not have signalled.
        """

    def release_step(self, number: int) -> None:
        """Let the drafter's stream continue after ``await_step(number)``.

        The verifier need not have signalled.
        """
