"""When the controller may probe a shape, and what its probes may cost.

Each step saves 0.7% of its time, and probes spend what was saved; only the first look at plain
decode need not wait for that. So failed probes cost about 1% of the time at most. The pauses
between them double until another shape takes over.
"""

from __future__ import annotations

import math

from verifier_svc.drafters.request import Shape
from verifier_svc.speculation.shape_speeds import Forecast, ShapeSpeeds

# Consecutive steps and walks of a probe at least.
PROBE_STEPS, PROBE_WALKS = 6, 12
# Steps until the first probe, and until the next one at most where each fails.
FIRST_PROBE_AFTER = 32
RAREST_PROBE_AFTER = 256
# Share of the time that failed probes may cost.
PROBE_SHARE = 0.007
# Steps that may be lost at once, if none were lost for long.
MOST_SAVED = 64


def probe_steps(batch: int) -> int:
    """Return the consecutive steps of a probe."""
    return max(PROBE_STEPS, PROBE_WALKS // batch)


class ProbeBudget:
    """Says when a probe may run, and what it may cost. Only the engine thread uses it."""

    def __init__(self, speeds: ShapeSpeeds) -> None:
        """``speeds``: what a probe's steps take and yield."""
        self._speeds = speeds
        # The first step of the next probe, and steps between two probes.
        self._next_at = self._pause = FIRST_PROBE_AFTER
        # Seconds that probes may lose now.
        self._saved_s = 0.0
        # The shape of a probe that was not paid for yet.
        self._unpaid: Shape | None = None

    # ---- what probes may cost ----

    def save(self, step_s: float) -> None:
        """Add a share of a step's time to what probes may lose."""
        self._saved_s = min(self._saved_s + PROBE_SHARE * step_s, MOST_SAVED * step_s)

    def affords(self, shape: Shape, forecast: Forecast) -> bool:
        """Return whether a probe of this shape loses no more than was saved."""
        return self._lost_s(shape, forecast) <= self._saved_s

    def owe(self, shape: Shape) -> None:
        """Note a probe. It is paid for later, because its own results say best what it cost."""
        self._unpaid = shape

    def pay(self, forecast: Forecast) -> None:
        """Pay for the last probe, if its shape can run at the forecast's batch size."""
        if self._unpaid is not None and forecast.speeds[self._unpaid]:
            self._saved_s -= self._lost_s(self._unpaid, forecast)
            self._unpaid = None

    def _lost_s(self, shape: Shape, forecast: Forecast) -> float:
        """Return the seconds that a probe of this shape loses.

        The changes there and back cost a step each.
        """
        batch, standing = forecast.batch, forecast.standing
        speed, standing_speed = forecast.speeds[shape], forecast.speeds[standing]
        if not speed:
            return math.inf
        if not standing_speed:
            # What stands cannot run at this batch.
            return 0.0
        seconds, tokens = self._speeds.step_s(shape, batch), self._speeds.tokens(shape)
        lost_s = tokens * (1 / speed - 1 / standing_speed)
        return probe_steps(batch) * max(lost_s, 0.0) + seconds + self._speeds.step_s(standing, batch)

    # ---- when probes may run ----

    def is_due(self, step: int) -> bool:
        """Return whether the pause is over."""
        return step >= self._next_at

    def allows_hopeless(self, num_stood: int) -> bool:
        """Return whether to probe without hope, after one shape has stood for so many steps.

        After so long the load may have changed, or the measurements were disturbed.
        """
        return num_stood >= RAREST_PROBE_AFTER and self._pause >= RAREST_PROBE_AFTER

    def wait_until(self, step: int) -> None:
        """Allow no probe before this step."""
        self._next_at = step

    def pause(self, step: int) -> None:
        """Allow no probe for a pause after this step."""
        self.wait_until(step + self._pause)

    def back_off(self, step: int) -> None:
        """Double the pause, then pause."""
        self._pause = min(2 * self._pause, RAREST_PROBE_AFTER)
        self.pause(step)

    def shorten_pauses(self) -> None:
        """Begin with short pauses again."""
        self._pause = FIRST_PROBE_AFTER
