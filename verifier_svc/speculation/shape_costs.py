"""Estimate what a step of a shape takes.

The target's pass over its rows was measured. A tree's drafts have more rows than a chain's, and
each of these should take a share of a row of the target's pass. The rest is learned.

The rest is one line for all shapes of a batch size, and a small part of each shape's own:

    rest = base + level * (1 + depth) + own + factor * prompts

``base`` is what every step takes beside the measured pass (contexts, the host), ``level`` one level
of a draft; asking for a draft costs as much as a level. ``prompts`` is what the target's pass over
the prompts should take. A Kalman filter (R. E. Kalman, 1960) for each half-octave of batch sizes
learns the four from the steps, whatever their shapes. So what slows all shapes down, like growing
contexts, makes no shape look better than another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from verifier_svc.drafters.request import NO_DRAFT, Shape

# A drafted row that a tree has beyond a chain as deep takes this share of a row of the target's
# pass. On an H200, a row of an EAGLE-3 head takes 1 to 3 us at a few hundred rows, one of the 8B
# target 21. Without it, after 16 trees of 16 nodes, chains and smaller trees were believed to be
# 10% slower than they were.
ROW_SHARE = 0.1
# Shares of the target's pass over the batch, before any step was measured: a level's mean, and
# standard deviations.
LEVEL_SHARE = 0.08
BASE_SPREAD, LEVEL_SPREAD = 0.3, 0.2
# Of the target's pass over the batch: no drafter's level takes less. Steps of one shape do not tell
# base and level apart. On an H200, a chain's first steps were slow for another reason. The deeper
# tree's steps after them were faster, so the estimate for a level fell below zero.
LEAST_LEVEL_SHARE = 0.02
# Of the shape's own pass.
OWN_SPREAD = 0.02
PROMPT_SPREAD = 0.15
# At a batch size near a known one: what is doubted of the known values, as a share of them, by
# half-octaves between.
NEARBY_DOUBT, MOST_DOUBT = 0.25, 1.0
# Standard deviations of one step: of its time, and of what its prompts take.
STEP_NOISE, PROMPT_NOISE = 0.06, 0.15
# Drift in one step: shares of the target's pass over the batch, and of the factor.
BASE_DRIFT, LEVEL_DRIFT, OWN_DRIFT, PROMPT_DRIFT = 0.008, 0.0004, 0.0008, 0.003
# A step further off than so many standard deviations was disturbed, and counts as if it were no
# further. If so many in a row are, it is the estimate that is wrong.
MOST_OFF, MOST_DISTURBED = 3.0, 3
# Doubt ends at so many times the first standard deviations. What the steps do not tell
# apart (base and level, while one shape runs) would else grow with every doubt until
# rounding makes a variance negative.
MOST_DOUBTED = 100.0
# Steps for which the target's times are taken as they are.
HOLD_FOR = 64
# Rows whose pass says what a prompt's token takes in one over many.
MANY_ROWS = (1024, 256, 64, 1)
LEAST_SHARE = 0.3

_BASE, _LEVEL, _FACTOR, _FIRST_OWN = range(4)


def batch_bucket(batch: int) -> int:
    """Return the half-octave of a batch size."""
    return round(2 * math.log2(batch))


class ShapeCosts:
    """Estimate steps by shape and batch. Only the engine thread uses it."""

    def __init__(self, verify_s: Callable[[int], float]) -> None:
        """``verify_s``: seconds of the target's pass by rows; infinite where it cannot run them."""
        self._verify_s = verify_s
        self._held: dict[int, float] = {}
        self._held_for = 0
        self._fits: dict[int, _Fit] = {}
        # The fit of the last step; it knows best what prompts take.
        self._latest: _Fit | None = None
        self._shape = NO_DRAFT

    def observe(self, shape: Shape, batch: int, seconds: float, num_prompt_tokens: int) -> None:
        """Learn from a step.

        The first one of another shape says more of the change than of the shape.
        """
        self._held_for += 1
        if self._held_for >= HOLD_FOR:
            self._held, self._held_for = {}, 0
        if shape != self._shape:
            self._shape = shape
            return
        nominal_s = self._nominal_s(shape, batch)
        if not math.isfinite(nominal_s):
            return
        bucket = batch_bucket(batch)
        fit = self._fits.get(bucket)
        if fit is None:
            fit = self._fits[bucket] = self._new_fit(batch)
        if self._latest is not None and self._latest is not fit:
            fit.take_factor(self._latest)
        self._latest = fit
        fit.observe(shape, nominal_s, seconds, self._nominal_prompt_s(num_prompt_tokens))

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of prompts of so many tokens."""
        return self.prompt_factor * self._nominal_prompt_s(num_tokens)

    def _nominal_prompt_s(self, num_tokens: int) -> float:
        """Return what prompts of so many tokens should take."""
        return num_tokens * self._row_s() if num_tokens else 0.0

    def _nominal_s(self, shape: Shape, batch: int) -> float:
        """Return what the target's pass and a tree's drafted rows beyond a chain's should take."""
        verify_s = self.verify(batch * shape.rows)
        # The first level has one row of a sequence, the others one for each branch.
        more = (shape.depth - 1) * (shape.branches - 1)
        return verify_s + ROW_SHARE * batch * more * self._row_s() if more else verify_s

    def _row_s(self) -> float:
        """Return what one row of many takes in the target's pass."""
        return next(s / rows for rows in MANY_ROWS if math.isfinite(s := self.verify(rows)))

    @property
    def prompt_factor(self) -> float:
        """What prompts take over what they should take."""
        return 1.0 if self._latest is None else max(float(self._latest.mean[_FACTOR]), 0.0)

    def estimate(self, shape: Shape, batch: int) -> float:
        """Return the seconds of a step without prompts.

        ``batch`` rows verify trees of this shape.
        """
        nominal_s = self._nominal_s(shape, batch)
        if not math.isfinite(nominal_s):
            return math.inf
        fit = self._fits.get(batch_bucket(batch))
        if fit is None:
            fit = self._new_fit(batch)
        return max(nominal_s + fit.rest(shape), LEAST_SHARE * nominal_s)

    def weight(self, shape: Shape, batch: int) -> int:
        """Return how many steps of this shape were measured at this bucket."""
        fit = self._fits.get(batch_bucket(batch))
        return fit.num_steps.get(shape, 0) if fit is not None else 0

    def verify(self, num_rows: int) -> float:
        """Return the seconds of the target's pass."""
        seconds = self._held.get(num_rows)
        if seconds is None:
            seconds = self._held[num_rows] = self._verify_s(num_rows)
        return seconds

    def _new_fit(self, batch: int) -> _Fit:
        """Return what is believed at a batch size where no step was measured.

        It is what the nearest one has shown.
        """
        bucket, verify_s = batch_bucket(batch), self.verify(batch)
        nearest = min(self._fits, key=lambda other: abs(other - bucket), default=None)
        fit = _Fit(verify_s)
        if nearest is not None:
            fit.believe(self._fits[nearest], abs(nearest - bucket))
        return fit


class _Fit:
    """The filter of one bucket of batch sizes.

    Attributes:
        mean: seconds of base and level, the prompts' factor, then each shape's own seconds.
        num_steps: measured, by shape.
    """

    def __init__(self, verify_s: float) -> None:
        """``verify_s``: seconds of the target's pass over the batch, one row each."""
        self._verify_s = verify_s
        self._own: dict[Shape, int] = {}
        self._num_disturbed = 0
        self.num_steps: dict[Shape, int] = {}
        self.mean: NDArray[np.float64] = np.array([0.0, LEVEL_SHARE * verify_s, 1.0])
        # The first standard deviations: of base, level and factor, then of each shape's own part.
        self._first_spreads = np.array([BASE_SPREAD * verify_s, LEVEL_SPREAD * verify_s, PROMPT_SPREAD])
        self._spread: NDArray[np.float64] = np.diag(self._first_spreads**2)
        self._drift = np.array([BASE_DRIFT * verify_s, LEVEL_DRIFT * verify_s, PROMPT_DRIFT]) ** 2

    def believe(self, other: _Fit, distance: int) -> None:
        """Begin with what another batch size has shown, ``distance`` half-octaves away."""
        scale = self._verify_s / other._verify_s
        doubt = min(NEARBY_DOUBT * distance, MOST_DOUBT)
        self.mean[:] = other.mean[:_FIRST_OWN] * (scale, scale, 1.0)
        known = np.diag(other._spread)[:_FIRST_OWN] * (scale**2, scale**2, 1.0)
        first = np.diag(self._spread)
        doubted = known + (doubt * self.mean) ** 2
        doubted[_FACTOR] = known[_FACTOR]
        self._spread = np.diag(np.minimum(doubted, np.maximum(first, known)))

    def take_factor(self, other: _Fit) -> None:
        """Take over what another batch size has learned of prompts last."""
        self.mean[_FACTOR] = other.mean[_FACTOR]
        self._spread[_FACTOR, :] = self._spread[:, _FACTOR] = 0.0
        self._spread[_FACTOR, _FACTOR] = other._spread[_FACTOR, _FACTOR]

    def rest(self, shape: Shape) -> float:
        """Return the seconds of a step beside the target's pass and prompts."""
        own = self._own.get(shape)
        line = float(self.mean[_BASE]) + float(self.mean[_LEVEL]) * _levels(shape)
        return line if own is None else line + float(self.mean[own])

    def observe(self, shape: Shape, nominal_s: float, seconds: float, prompt_s: float) -> None:
        """Learn from a step.

        It should take ``nominal_s`` without the rest, and its prompts ``prompt_s``.
        """
        self.num_steps[shape] = self.num_steps.get(shape, 0) + 1
        parts = self._parts(shape, nominal_s)
        parts[_BASE], parts[_LEVEL], parts[_FACTOR] = 1.0, _levels(shape), prompt_s
        self._spread.flat[:: len(parts) + 1] += self._drift
        off = seconds - nominal_s - float(parts @ self.mean)
        shared = self._spread @ parts
        expected = max(seconds - off, LEAST_SHARE * nominal_s)
        noise = (STEP_NOISE * expected) ** 2 + (PROMPT_NOISE * prompt_s) ** 2
        variance = float(parts @ shared) + noise
        most = MOST_OFF * math.sqrt(variance)
        self._num_disturbed = self._num_disturbed + 1 if abs(off) > most else 0
        if self._num_disturbed > MOST_DISTURBED:
            # All that was believed is doubted, and what was doubted most is believed least.
            self._num_disturbed = 0
            self._doubt((off / most) ** 2)
            shared = self._spread @ parts
            variance = float(parts @ shared) + noise
        else:
            off = min(max(off, -most), most)
        self.mean += shared * (off / variance)
        self._spread -= np.outer(shared, shared) / variance
        lack = LEAST_LEVEL_SHARE * self._verify_s - self.mean[_LEVEL]
        if lack > 0:
            # The other parts move along, so the seconds of shapes that ran stay what they are.
            self.mean += self._spread[:, _LEVEL] * (lack / self._spread[_LEVEL, _LEVEL])

    def _doubt(self, times: float) -> None:
        """Multiply the variances, up to a limit.

        It cuts whole directions, so what is known of sums stays known.
        """
        values, directions = np.linalg.eigh(self._spread / np.outer(self._first_spreads, self._first_spreads))
        doubted = np.minimum(times * values, np.maximum(values, MOST_DOUBTED**2)).clip(min=0.0)
        directions *= self._first_spreads[:, np.newaxis]
        self._spread = (directions * doubted) @ directions.T

    def _parts(self, shape: Shape, nominal_s: float) -> NDArray[np.float64]:
        """Return the parts of a step of this shape; only its own part is set.

        A new shape gets its place.
        """
        at = self._own.get(shape)
        if at is None:
            at = self._own[shape] = len(self.mean)
            self.mean = np.append(self.mean, 0.0)
            self._spread = np.pad(self._spread, (0, 1))
            self._first_spreads = np.append(self._first_spreads, OWN_SPREAD * nominal_s)
            self._spread[at, at] = self._first_spreads[at] ** 2
            self._drift = np.append(self._drift, (OWN_DRIFT * self._verify_s) ** 2)
        parts = np.zeros(len(self.mean))
        parts[at] = 1.0
        return parts


def _levels(shape: Shape) -> int:
    """Return how many levels' time a shape's drafts take.

    Asking for them costs as much as a level.
    """
    return 0 if shape == NO_DRAFT else 1 + shape.depth
