"""One controller for each drafter with a model, and for how long its drafts have not paid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation.candidate_shapes import suits
from verifier_svc.speculation.controller import Controller, Reason
from verifier_svc.speculation.controller_log import Record, write_anew

# Steps in a row in which drafts do not pay, after which a run goes on without the drafter.
PLAIN_AFTER = 64
# Steps between two looks at the figures behind a choice.
FIGURES_EVERY = 64


class DrafterController(Controller):
    """A drafter's controller. It outlives attachments.

    The other arguments are the controller's.
    """

    def __init__(
        self,
        drafter: DrafterHandle,
        bounds: TreeBounds,
        verify_s: Callable[[int], float],
        *,
        limit_s: float,
        log: Callable[[Record], None] | None = None,
    ) -> None:
        super().__init__(bounds, verify_s, limit_s=limit_s, log=log)
        self._drafter = drafter
        self._num_plain = self._num_chosen = 0

    @property
    def number(self) -> int:
        """Return the drafter's number."""
        return self._drafter.number

    @property
    def rests(self) -> bool:
        """Return whether drafts have not paid for so long that steps go on without the drafter."""
        return self._num_plain >= PLAIN_AFTER

    def choose(self, batch: int) -> Shape:
        """Return the shape in which ``batch`` sequences draft in the next step, and publish why."""
        shape = super().choose(batch)
        self._num_plain = self._num_plain + 1 if shape == NO_DRAFT else 0
        if self._num_chosen % FIGURES_EVERY == 0:
            self._drafter.decision = self._figures(shape)
        self._num_chosen += 1
        return shape

    def suits(self, shape: Shape, batch: int) -> bool:
        """Return whether ``batch`` sequences may draft in this shape.

        A single shape is for all batches.
        """
        return len(self.shapes) == 1 or suits(shape, batch)

    def _figures(self, shape: Shape) -> dict[str, float]:
        """Return the figures behind a choice, as gauges of the drafter: other threads read them."""
        figures = self.explain()
        sizes = {
            "chosen_nodes": float(shape.nodes),
            "chosen_levels": float(shape.depth if shape.nodes > 1 else 0),
            "chosen_rows": float(shape.rows),
        }
        reasons = {f"chosen_because_{reason}": float(reason == figures["reason"]) for reason in Reason}
        numbers = {f"chosen_{name}": float(value) for name, value in figures.items() if not isinstance(value, str)}
        return sizes | reasons | numbers


class DrafterControllers:
    """The controllers of all drafters with a model. Only the engine thread uses it.

    Args:
        verify_s: seconds of a target's pass by rows.
        limit_s: seconds that a step should take at most with its prompts.
        log: begins the names of the logs, one for each drafter; empty: there are none.
    """

    def __init__(self, bounds: TreeBounds, verify_s: Callable[[int], float], limit_s: float, log: str) -> None:
        self._bounds, self._verify_s, self._limit_s, self._log = bounds, verify_s, limit_s, log
        self._known: dict[int, DrafterController] = {}

    def of(self, drafter: DrafterHandle) -> DrafterController:
        """Return the controller of a drafter with a model.

        Raises OSError if its log cannot be made.
        """
        known = self._known.get(drafter.number)
        if known is None:
            log = write_anew(Path(f"{self._log}.{drafter.name}")) if self._log else None
            known = DrafterController(drafter, self._bounds, self._verify_s, limit_s=self._limit_s, log=log)
            self._known[drafter.number] = known
        return known
