"""One controller for each drafter with a model, and for how long its drafts have not paid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation.controller import Controller
from verifier_svc.speculation.controller_log import write_to

# Steps in a row in which drafts do not pay, after which a run goes on without the drafter.
PLAIN_AFTER = 64


class DrafterController:
    """A drafter's controller. It outlives attachments."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._num_plain = 0

    @property
    def rests(self) -> bool:
        """Return whether drafts have not paid for so long that steps go on without the drafter."""
        return self._num_plain >= PLAIN_AFTER

    def choose(self, num_sequences: int) -> Shape:
        """Return the shape of the next trees for a batch."""
        shape = self.controller.choose(num_sequences)
        self._num_plain = self._num_plain + 1 if shape == NO_DRAFT else 0
        return shape


class DrafterControllers:
    """Used by the engine thread alone.

    Args:
        verify_s: seconds of a target's pass by rows.
        log: begins the names of the logs, one for each drafter; empty: there are none.
    """

    def __init__(self, bounds: TreeBounds, verify_s: Callable[[int], float], log: str) -> None:
        self._bounds, self._verify_s, self._log = bounds, verify_s, log
        self._known: dict[int, DrafterController] = {}

    def of(self, drafter: DrafterHandle) -> DrafterController:
        """Return the controller of a drafter with a model. Raises OSError if its log cannot be made."""
        known = self._known.get(drafter.number)
        if known is None:
            log = None
            if self._log:
                # Open as long as the server runs, and written line by line: it may be killed.
                path = Path(f"{self._log}.{drafter.name}")
                log = write_to(path.open("w", buffering=1, encoding="ascii"))
            known = DrafterController(Controller(self._bounds, self._verify_s, log=log))
            self._known[drafter.number] = known
        return known
