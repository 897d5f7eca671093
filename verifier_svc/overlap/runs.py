"""Start runs of overlapped steps, and capture their graphs while nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import product
from typing import TYPE_CHECKING

from foretoken.overlap_memory import OverlapMemory, StreamOrder
from verifier_svc.drafters.attachment import Attachment
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.step_deadlines import StepDeadlines
from verifier_svc.lifecycle import Lifecycle
from verifier_svc.overlap.run import OverlappedRun, RunningEngine
from verifier_svc.overlap.sizes import ShapeRows, rows_of_shapes
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.speculation.overlap_drafting import OverlapDrafting
from verifier_svc.speculation.overlap_policy import OverlapObstacle
from verifier_svc.speculation.speculator import Speculator

if TYPE_CHECKING:
    from verifier_svc.overlap.step import OverlappedStep


class OverlapRuns:
    """Start runs of overlapped steps. Only the engine thread uses it.

    Args:
        make_step: makes the step for a drafter's memory and stream order.
        plain: the step of runs without a drafter.
        timeout_s: the shortest time that a step waits for its draft before it goes on without.
    """

    def __init__(
        self,
        make_step: Callable[[OverlapMemory, StreamOrder], OverlappedStep],
        plain: OverlappedStep,
        *,
        timeout_s: float,
    ) -> None:
        self._make_step, self._plain = make_step, plain
        self._timeout_s = timeout_s
        # The step of each drafter's memory, by drafter number, and the deadlines of its drafts.
        # While attached, step numbers only grow.
        self._drafted: dict[int, tuple[OverlappedStep, StepDeadlines]] = {}
        # The captures that are left to do, by step and whether for long sequences,
        # for buffers of this generation.
        self._captures: dict[tuple[OverlappedStep, bool], tuple[int, Iterator[None]]] = {}

    def run(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        lifecycle: Lifecycle,
        engine: RunningEngine,
    ) -> OverlapObstacle | None:
        """Run overlapped steps as long as possible.

        Returns the reason if an ordinary step must come first, else None.
        """
        self._forget_memory(speculator.drafters)
        drafting = speculator.overlap.drafting(scheduler.running, scheduler.admissible)
        if isinstance(drafting, OverlapObstacle):
            return drafting
        step, deadlines = self._step_of(drafting)
        return OverlappedRun(step, drafting, scheduler, speculator, lifecycle, deadlines).run(engine)

    def prepare(self, speculator: Speculator) -> bool:
        """Capture one more graph of a usual size. Return whether there may be more to do.

        Called while no sequence runs.
        """
        self._forget_memory(speculator.drafters)
        steps: dict[OverlappedStep, tuple[tuple[int, ...], list[ShapeRows]]] = {}
        for drafter in speculator.drafters:
            attachment = drafter.attachment
            if attachment is not None and attachment.has_overlap_memory and attachment.has_answered():
                shapes = rows_of_shapes(speculator.overlap.controllers.of(drafter).shapes)
                steps[self._step_for(drafter, attachment)[0]] = attachment.needs.captured_layers, shapes
        # Where sequences are drafted for, steps without the drafter are rarer.
        steps[self._plain] = (), [ShapeRows(1, 1)]
        has_lookups = any(drafter.is_attached and not drafter.has_model for drafter in speculator.drafters)
        for is_long, (step, (layers, shapes)) in product((False, True), steps.items()):
            if is_long and not step.has_long_sequences:
                continue
            generation, captures = self._captures.get((step, is_long), (None, None))
            if captures is None or generation != step.generation:
                captures = step.captures(layers, shapes, has_found=has_lookups, is_long=is_long)
                self._captures[step, is_long] = step.generation, captures
            if next(captures, self) is not self:
                return True
        return False

    def _step_of(self, drafting: OverlapDrafting) -> tuple[OverlappedStep, StepDeadlines]:
        if drafting.drafter is None or drafting.attachment is None:
            return self._plain, StepDeadlines(self._timeout_s)
        return self._step_for(drafting.drafter, drafting.attachment)

    def _step_for(self, drafter: DrafterHandle, attachment: Attachment) -> tuple[OverlappedStep, StepDeadlines]:
        memory = attachment.transport.overlap_memory
        assert memory is not None
        known = self._drafted.get(drafter.number)
        if known is None or known[0].memory is not memory:
            step, deadlines = self._make_step(memory, attachment.transport.order), StepDeadlines(self._timeout_s)
            known = self._drafted[drafter.number] = step, deadlines
            known[0].warm_up(attachment.needs.captured_layers)
        return known

    def _forget_memory(self, drafters: Items[DrafterHandle]) -> None:
        """Drop the steps of drafters that detached, or attached again with other memory."""
        for number, (step, _) in list(self._drafted.items()):
            attachment = drafters[number - 1].attachment
            if attachment is None or attachment.transport.overlap_memory is not step.memory:
                del self._drafted[number]
                for is_long in (False, True):
                    self._captures.pop((step, is_long), None)
