"""A machine that exists in numbers only: what steps take, what drafts are
worth, and the clock that follows from both.

It drives a controller as the overlapped loop does: a step's results are read one step late. It also
says what any fixed shape makes, exactly, so that a controller can be held against the best of them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.speculation.controller import Controller

# Milliseconds of the target's pass by rows: an 8B model on one H200.
H200_MS = {
    1: 4.25,
    16: 4.5,
    64: 5.0,
    96: 6.3,
    128: 6.8,
    192: 8.0,
    256: 9.0,
    384: 11.5,
    512: 14.0,
    1024: 25.0,
    2048: 48.0,
}

PROMPT_TOKENS = 100, 500
# Of a draft's tokens some are sure to hold and the others are not; the
# draft head knows which are which.
SURE, UNSURE = 0.98, 0.35
# Share of steps that are disturbed, and how many times as long they take.
DISTURBED, LONGER = 0.003, (2.0, 6.0)


@dataclass(frozen=True, slots=True)
class Phase:
    """A while in which nothing changes.

    Attributes:
        seconds: of machine time.
        batch: sequences that decode.
        chances: for each level of a chain, the chance that it holds.
        output_tokens: tokens of one output, each of which brings a prompt along; 0: no prompts.
    """

    seconds: float
    batch: int
    chances: tuple[float, ...]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """
    Attributes:
        verify_ms: by rows.
        level_ms: of one level of a draft, and of asking.
        row_us: of one row in one level.
        tree_share: a tree's misses over a chain's, to the power of its nodes a level.
        prompt_us: of one prompt token.
        context_us: of one sequence: its context, which the measured
            pass of the target does not read.
        noise: standard deviation of a step's time, relative.
    """

    verify_ms: dict[int, float]
    level_ms: float = 0.25
    row_us: float = 0.4
    tree_power: float = -0.5
    prompt_us: float = 22.0
    context_us: float = 0.0
    noise: float = 0.05

    def verify_s(self, num_rows: int) -> float:
        rows = sorted(self.verify_ms)
        right = min(max(bisect.bisect_left(rows, num_rows), 1), len(rows) - 1)
        low, high = rows[right - 1], rows[right]
        share = (num_rows - low) / (high - low)
        return 1e-3 * (self.verify_ms[low] + share * (self.verify_ms[high] - self.verify_ms[low]))

    def step_s(self, shape: Shape, batch: int) -> float:
        context_s = 1e-6 * self.context_us * batch
        if shape == NO_DRAFT:
            return self.verify_s(batch) + context_s
        # The first level has one row of a sequence, the others one for each branch.
        rows = 1 + (shape.depth - 1) * shape.branches
        draft_s = 1e-3 * self.level_ms * (1 + shape.depth) + 1e-6 * self.row_us * batch * rows
        return self.verify_s(batch * shape.rows) + context_s + draft_s

    def chance(self, shape: Shape, level: int, chances: Sequence[float]) -> float:
        miss = 1 - chances[min(level, len(chances) - 1)]
        return 1 - miss * ((shape.nodes - 1) / shape.depth) ** self.tree_power

    def tokens(self, shape: Shape, chances: Sequence[float]) -> float:
        if shape == NO_DRAFT:
            return 1.0
        if shape.budget:
            return _shared_tokens(shape, tuple(chances))
        running = total = 1.0
        for level in range(shape.depth):
            running *= self.chance(shape, level, chances)
            total += running
        return total


def fixed_speed(machine: Machine, shape: Shape, phases: Sequence[Phase]) -> float:
    """Return the tokens a second of one shape, with the prompts that its tokens bring along."""
    total = 0.0
    for phase in phases:
        tokens = phase.batch * machine.tokens(shape, phase.chances)
        step_s = machine.step_s(shape, phase.batch)
        if phase.output_tokens:
            step_s += 1e-6 * machine.prompt_us * sum(PROMPT_TOKENS) / 2 * tokens / phase.output_tokens
        total += phase.seconds * tokens / step_s
    return total / sum(phase.seconds for phase in phases)


@dataclass(slots=True)
class Run:
    """What a controller made."""

    speed: float
    shapes: list[Shape]


def drive(machine: Machine, controller: Controller, phases: Sequence[Phase], seed: int = 0) -> Run:
    """Run a controller through the phases."""
    rng = np.random.default_rng(seed)
    tokens = 0
    shapes: list[Shape] = []
    results: list[tuple[Shape, int, float, int, list[int]]] = []
    former = NO_DRAFT
    emitted, owed_prompts = 0, 0.0
    for phase in phases:
        left_s = phase.seconds
        while left_s > 0:
            shape = controller.choose(phase.batch)
            shapes.append(shape)
            for result in results:
                _tell(controller, *result)
            step_s = machine.step_s(shape, phase.batch)
            seconds = step_s * _noise(machine, rng)
            if shape != former:
                seconds += step_s
                former = shape
            num_prompt_tokens = 0
            if phase.output_tokens:
                owed_prompts += emitted / phase.output_tokens
                while owed_prompts >= 1:
                    owed_prompts -= 1
                    num_prompt_tokens += int(rng.integers(*PROMPT_TOKENS, endpoint=True))
                seconds += 1e-6 * machine.prompt_us * num_prompt_tokens * _noise(machine, rng)
            matched = _matched(machine, shape, phase, rng)
            results = [(shape, phase.batch, seconds, num_prompt_tokens, matched)]
            emitted = phase.batch + sum(matched)
            tokens += emitted
            left_s -= seconds
    return Run(tokens / sum(phase.seconds for phase in phases), shapes)


def _noise(machine: Machine, rng: np.random.Generator) -> float:
    """Return a factor of a step's time whose mean is 1."""
    factor = math.exp(machine.noise * rng.standard_normal() - machine.noise**2 / 2)
    if rng.random() < DISTURBED:
        factor *= rng.uniform(*LONGER)
    return factor / (1 + DISTURBED * (sum(LONGER) / 2 - 1))


def _matched(machine: Machine, shape: Shape, phase: Phase, rng: np.random.Generator) -> list[int]:
    """Return how many levels held in each row."""
    if shape == NO_DRAFT:
        return [0] * phase.batch
    if shape.budget:
        return _shared(shape, phase.chances, phase.batch, rng).tolist()
    matched: list[int] = []
    left = phase.batch
    for level in range(shape.depth):
        held = int(rng.binomial(left, machine.chance(shape, level, phase.chances)))
        matched += [level] * (left - held)
        left = held
    return matched + [shape.depth] * left


def _shared(shape: Shape, chances: Sequence[float], batch: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return how many levels held in each chain of a batch that shares its rows."""
    mean = np.array([chances[min(level, len(chances) - 1)] for level in range(shape.depth)])
    share = np.clip((mean - UNSURE) / (SURE - UNSURE), 0.0, 1.0)
    is_sure = rng.random((batch, shape.depth)) < share
    chance = np.where(is_sure, np.maximum(mean, SURE), np.minimum(mean, UNSURE))
    scores = np.cumprod(chance, axis=1)
    quota = batch * (shape.budget - 1)
    best = np.argsort(-scores, axis=None, kind="stable")[:quota]
    rows = np.zeros(scores.size, np.int64)
    rows[best] = 1
    held = np.cumprod(rng.random(chance.shape) < chance, axis=1)
    return np.asarray(np.minimum(held.sum(axis=1), rows.reshape(scores.shape).sum(axis=1)))


@cache
def _shared_tokens(shape: Shape, chances: tuple[float, ...]) -> float:
    """Return the tokens of a chain whose batch shares its rows, to a percent."""
    return 1.0 + float(_shared(shape, chances, 16384, np.random.default_rng(1)).mean())


def _tell(
    controller: Controller, shape: Shape, batch: int, seconds: float, num_prompt_tokens: int, matched: list[int]
) -> None:
    controller.observe_step(shape, batch, seconds, num_prompt_tokens=num_prompt_tokens)
    if shape != NO_DRAFT:
        for count in matched:
            controller.observe_walk(shape, count, shape.depth)
