"""Feed an ordinary step's results to a drafter on this GPU.

They go where it finds the results of overlapped steps.

To the drafter such a step is a run of one step. The host knows its tokens and copies them. Hidden
states go from where the target computed them to where the drafter reads them, and never to the
host. This module knows neither handles nor transports.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.overlap_memory import OverlapLayout, OverlapMemory
from verifier_svc.drafters.request import DraftRow


def can_feed(rows: Items[DraftRow], layout: OverlapLayout) -> bool:
    """Return whether a memory can take all that these rows send.

    Each row must have the last few tokens of a sequence that the drafter knows, and hidden states
    that are where the last pass left them. A batch slot may have only one row.
    """
    return len(rows) == len({row.batch_slot for row in rows}) <= layout.batch_rows and all(
        _fits(row, layout) for row in rows
    )


def _fits(row: DraftRow, layout: OverlapLayout) -> bool:
    count = len(row.new_tokens)
    if not 0 < count <= min(layout.tokens, row.length - 1):
        return False
    if not layout.hidden_width:
        # A sequence that ended before the last pass may have its last KV entries in
        # blocks that are others' by now.
        return not row.has_ended
    return sum(map(len, row.hidden)) == count and all(
        part.columns is None and part.source.on_device is not None and part.source.width == layout.hidden_width
        for part in row.hidden
    )


def as_batch_rows(rows: Items[DraftRow], block_size: int) -> list[DraftRow]:
    """Return the rows of a run's first request.

    They name what the drafter was sent before, and the blocks that are new to it.
    """
    return [_as_batch_row(row, block_size) for row in rows]


def _as_batch_row(row: DraftRow, block_size: int) -> DraftRow:
    sent = row.length - len(row.new_tokens)
    # The drafter knows the first block if the sequence has begun it.
    blocks = row.block_ids[1:] if sent % block_size else row.block_ids
    return row._replace(length=sent, new_tokens=[], hidden=[], block_ids=blocks)


class DeviceFeed:
    """Copies steps to device memory. Not for two threads at once; keeps no reference to a memory.

    Args:
        layout: the layout of the memories.
        device: where they and the hidden states are.
    """

    def __init__(self, layout: OverlapLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        is_cuda = device.type == "cuda"
        self._host = OverlapMemory.mirror(layout, pinned=is_cuda)
        self._columns = {
            name: getattr(self._host, name).numpy() for name in ("counts", "lengths", "num_left", "new_tokens")
        }
        self._places = PinnedBuffers({"rows": ((layout.batch_rows * layout.tokens,), torch.int32)}, device)
        self._sent: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def place(self, rows: Items[DraftRow], memory: OverlapMemory, number: int) -> None:
        """Enqueue all copies of step ``number``.

        Row ``i``, which passed ``can_feed``, gets batch row ``i``.

        Nobody else may read or write the memory's results now or soon.
        """
        if self._sent is not None:
            self._sent.synchronize()
        tokens = self.layout.tokens
        counts, lengths, num_left, new_tokens = self._columns.values()
        self._places.wait()
        places = self._places.host["rows"]
        counts[:] = num_left[:] = 0
        for batch_row, row in enumerate(rows):
            count, first = len(row.new_tokens), batch_row * tokens
            counts[batch_row], lengths[batch_row] = count, row.length
            num_left[batch_row] = 0 if row.has_ended else row.sequence.max_new_tokens
            new_tokens[batch_row, :count] = row.new_tokens
            if self.layout.hidden_width:
                places[first : first + count] = [place for part in row.hidden for place in part.places]
                # Nobody reads these rows: any row of the pass will do.
                places[first + count : first + tokens] = places[first]
        memory.results.copy_(self._host.results, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        if self.layout.hidden_width:
            hidden_states = rows[0].hidden[0].source.on_device
            assert hidden_states is not None
            self._places.send()
            taken = len(rows) * tokens
            torch.index_select(hidden_states, 0, self._places.device["rows"][:taken], out=memory.hidden[:taken])
        # After everything that it stands for.
        memory.stamp.fill_(number)
