"""The schedule of strikes on processes, drawn from a seed, in proportion to the run's length."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# "drafter" is the n-gram drafter, "head" the demo model's EAGLE-3 head.
Process = Literal["verifier", "drafter", "head", "gateway", "supervisor"]
DRAFTERS: dict[Process, str] = {"drafter": "ngram", "head": "eagle3"}
# kill: SIGKILL. stop: SIGSTOP for good; its watcher must replace it. pause: SIGSTOP, SIGCONT later.
Action = Literal["kill", "stop", "pause"]
SECONDS_PER_DEATH: dict[Process, float] = {"verifier": 20.0, "drafter": 10.0, "head": 20.0, "gateway": 60.0}


@dataclass(frozen=True, slots=True)
class Strike:
    """One blow.

    Attributes:
        at_s: seconds after the beginning; the strike waits for a process that is not ready by then.
        chained_s: instead of ``at_s``, seconds after the previous strike on the same process, even
            if it is still starting.
        pause_s: for a pause, until SIGCONT; for a stopped drafter, until SIGKILL if nobody has
            replaced it.
    """

    process: Process
    action: Action
    at_s: float
    chained_s: float | None = None
    pause_s: float = 0.0

    @property
    def is_death(self) -> bool:
        return self.action != "pause"


def draw_schedule(
    seconds: float, seed: int, seconds_per_death: Mapping[Process, float] = SECONDS_PER_DEATH
) -> list[Strike]:
    """Draw all strikes in the order of their times, chained ones after their predecessors."""
    generator = random.Random(f"schedule {seed}")
    num_verifier = math.ceil(seconds / seconds_per_death["verifier"])
    num_drafter = math.ceil(seconds / seconds_per_death["drafter"])
    num_head = math.ceil(seconds / seconds_per_death["head"])
    num_gateway = max(1, round(seconds / seconds_per_death["gateway"]))
    strikes = [
        *_deaths("verifier", num_verifier, seconds, generator, num_stops=num_verifier // 3),
        *_deaths("drafter", num_drafter, seconds, generator, num_stops=num_drafter // 3),
        *_deaths("head", num_head, seconds, generator, num_stops=num_head // 3),
        *_deaths("gateway", num_gateway, seconds, generator, num_stops=0, num_chained=0),
        # Shorter than the silence that counts as death.
        *_pauses("verifier", max(1, num_verifier // 3), seconds, generator, longest_s=2.5),
        *_pauses("drafter", max(1, num_drafter // 3), seconds, generator, longest_s=3.0),
        *_pauses("head", max(1, num_head // 3), seconds, generator, longest_s=3.0),
        *_pauses("gateway", num_gateway, seconds, generator, longest_s=2.0),
        *_pauses("supervisor", num_gateway, seconds, generator, longest_s=2.0),
    ]
    # Stable: a chained strike has the time of the one before it.
    return sorted(strikes, key=lambda strike: strike.at_s)


def num_deaths(strikes: Sequence[Strike], process: Process) -> int:
    """Return the number of one process's deaths in the schedule."""
    return sum(strike.is_death and strike.process == process for strike in strikes)


def _deaths(
    process: Process,
    count: int,
    seconds: float,
    generator: random.Random,
    *,
    num_stops: int,
    num_chained: int | None = None,
) -> list[Strike]:
    """Draw ``count`` deaths, one in each equal part of the time, and some of starting processes."""
    actions: list[Action] = ["stop" if number < num_stops else "kill" for number in range(count)]
    generator.shuffle(actions)
    num_chained = max(1, count // 6) if num_chained is None else num_chained
    followed = set(generator.sample([i for i, action in enumerate(actions) if action == "kill"], num_chained))
    part_s = seconds / count
    strikes = []
    for number, action in enumerate(actions):
        at_s = (number + generator.uniform(0.1, 0.5)) * part_s
        strikes.append(Strike(process, action, at_s, pause_s=generator.uniform(1.0, 5.0) if action == "stop" else 0.0))
        if number in followed:
            strikes.append(Strike(process, "kill", at_s, chained_s=generator.uniform(0.2, 3.0)))
    return strikes


def _pauses(
    process: Process, count: int, seconds: float, generator: random.Random, *, longest_s: float
) -> list[Strike]:
    return [
        Strike(
            process,
            "pause",
            (number + generator.uniform(0.5, 1.0)) * seconds / count,
            pause_s=generator.uniform(0.2, longest_s),
        )
        for number in range(count)
    ]
