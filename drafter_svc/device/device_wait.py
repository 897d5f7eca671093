"""Wait for a device whose stream may itself wait for a verifier that is gone."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import torch

from foretoken.overlap_memory import StreamOrder

# Seconds after which a step that does not come is given up. A verifier may compile kernels first.
_MAX_WAIT_S = 10.0


class DeviceWait:
    """Waits for the drafter's stream, which waits for the verifier's steps."""

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        self._order, self._is_cuda = order, device.type == "cuda"

    def until(self, is_done: Callable[[], bool], number: int) -> None:
        """Wait until the device has arrived.

        After the deadline, let its stream continue without step ``number``.
        """
        deadline = monotonic() + _MAX_WAIT_S
        while not is_done():
            if monotonic() > deadline:
                self._order.release_step(number)

    def until_idle(self, number: int) -> None:
        """Wait for all work that has been launched; as ``until`` does."""
        if self._is_cuda:
            reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            reached.record()
            self.until(reached.query, number)
