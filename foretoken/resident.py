"""Device memory in which a verifier and a drafter on one GPU leave each other a step's results and its next trees.

Where the host runs ahead it does not know what step n committed when it asks for the trees of step n + 1: both lie
here. Each part has one writer. ``stamp`` and ``draft_stamp`` are written behind all that they stand for, in the order
of the stream; a part with another stamp than expected is of another step, or half written, and is not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Each array begins at a multiple of this: what a vector load wants.
_ALIGNMENT = 256


class ResidentLayout(NamedTuple):
    """Sizes of a ResidentMemory.

    Attributes:
        seats: sequences of one step at most.
        tokens: that one step commits for one sequence at most.
        nodes: of one tree at most, the root counted.
        hidden_width: elements of the target's hidden rows that go with each token; 0: none do.
        hidden_dtype: of those.
    """

    seats: int
    tokens: int
    nodes: int
    hidden_width: int
    hidden_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return _spans(self)[1]


class ResidentMemory(NamedTuple):
    """Views of one allocation; int32 unless said otherwise. ``seats`` and ``tokens`` as of the layout.

    Attributes:
        layout: sizes.
        stamp: [1]; number of the step whose results these are. Written by the verifier, with all down to ``hidden``.
        counts: [seats]; tokens that the step committed; 0 for a seat that nobody sits in.
        lengths: [seats]; of the sequence with them.
        num_left: [seats]; tokens that it may still emit: 0 if it has ended, or nobody sits there.
        new_tokens: [seats, tokens]; of each seat the first ``counts``.
        hidden: ``hidden_dtype`` [seats * tokens, hidden_width]; row ``seat * tokens + j`` is of the position before
            that of ``new_tokens[seat, j]``.
        draft_stamp: [1]; number of the step behind which these trees grow. Written by the drafter, as what follows.
        num_nodes: [seats].
        draft_tokens, draft_parents: [seats, nodes]; the root comes first, its parent is -1.
        draft_scores: float32 [seats, nodes]; see DraftBatch.scores.
        results: uint8; ``counts`` to ``new_tokens`` as they lie, for one copy of all.
        drafts: uint8; ``num_nodes`` to ``draft_scores``, the same.
    """

    layout: ResidentLayout
    stamp: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    num_left: torch.Tensor
    new_tokens: torch.Tensor
    hidden: torch.Tensor
    draft_stamp: torch.Tensor
    num_nodes: torch.Tensor
    draft_tokens: torch.Tensor
    draft_parents: torch.Tensor
    draft_scores: torch.Tensor
    results: torch.Tensor
    drafts: torch.Tensor

    @staticmethod
    def over(memory: torch.Tensor, layout: ResidentLayout) -> ResidentMemory:
        """``memory``: uint8 [layout.num_bytes at least], zeroed by whoever made it."""
        spans, size = _spans(layout)
        if memory.dtype != torch.uint8 or memory.numel() < size:
            raise ValueError(f"resident memory of {memory.numel()} bytes, its layout needs {size}")
        views = {
            name: memory[low : low + num_bytes].view(dtype).view(shape)
            for name, (low, num_bytes, shape, dtype) in spans.items()
        }
        low, middle, high = (spans[name][0] for name in ("counts", "hidden", "num_nodes"))
        return ResidentMemory(layout, **views, results=memory[low:middle], drafts=memory[high:size])

    @staticmethod
    def mirror(layout: ResidentLayout, *, pinned: bool) -> ResidentMemory:
        """On the host, without hidden rows: ``results`` and ``drafts`` lie as those of a memory of this layout do."""
        small = layout._replace(hidden_width=0)
        with torch.inference_mode(False):
            return ResidentMemory.over(torch.zeros(small.num_bytes, dtype=torch.uint8, pin_memory=pinned), small)


def _spans(layout: ResidentLayout) -> tuple[dict[str, tuple[int, int, tuple[int, ...], torch.dtype]], int]:
    """Of each array: offset, bytes, shape, element type; and the bytes of all."""
    seats, tokens, nodes, width, hidden_dtype = layout
    arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "stamp": ((1,), torch.int32),
        "counts": ((seats,), torch.int32),
        "lengths": ((seats,), torch.int32),
        "num_left": ((seats,), torch.int32),
        "new_tokens": ((seats, tokens), torch.int32),
        "hidden": ((seats * tokens, width), hidden_dtype),
        "draft_stamp": ((1,), torch.int32),
        "num_nodes": ((seats,), torch.int32),
        "draft_tokens": ((seats, nodes), torch.int32),
        "draft_parents": ((seats, nodes), torch.int32),
        "draft_scores": ((seats, nodes), torch.float32),
    }
    spans = {}
    size = 0
    for name, (shape, dtype) in arrays.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        spans[name] = (size, num_bytes, shape, dtype)
        size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return spans, size


class StreamOrder:
    """Order between the work of two sides on one GPU. This one is of sides that share a stream: nothing is to be done.

    Numbers grow. What a side launched before ``signal_...`` is done before what the other launches behind
    ``await_...`` of the same or a smaller number begins.
    """

    def signal_step(self, number: int) -> None:
        """The verifier's: the results of step ``number`` are in the memory, as of here in the stream."""

    def await_step(self, number: int) -> None:
        """The drafter's."""

    def signal_draft(self, number: int) -> None:
        """The drafter's: the trees behind step ``number`` are in the memory, as of here in the stream."""

    def await_draft(self, number: int) -> None:
        """The verifier's."""

    def release_draft(self, number: int) -> None:
        """The verifier's host: let its own stream go on past ``await_draft(number)``, with or without the drafter."""

    def release_step(self, number: int) -> None:
        """The drafter's host: the same for ``await_step(number)``."""
