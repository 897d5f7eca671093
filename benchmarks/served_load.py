"""Compare the server's own choice with plain decode and fixed shapes on a CPU.

``make bench-load`` runs it.

    python -m benchmarks.served_load [--quick] [--streams 1,2,4] [--output FILE]

Streams of held-out code run against the demo model over HTTP. First each fixed shape runs alone,
once, to find the best one for each number of streams. Then plain decode, ``auto`` (EAGLE-3 and
n-grams) and the best shape run in turns of a second or so, in five rounds; a ratio is the median of
the five. Each round starts the servers again. The exit status is 1 if a bar is missed. It takes
about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks import environment
from benchmarks.arm_server import ArmServer, Launch
from benchmarks.arms import ARMS, Arm
from benchmarks.command import finish, numbers, progress, take_cores
from benchmarks.figures import median
from benchmarks.measure import UnexpectedAnswerError
from benchmarks.report import Bar, Figure, figures_table, missed_bars
from benchmarks.stack import StackError
from benchmarks.workloads import LoadPoint, Requests, ServingWorkload
from foretoken.bench.bottleneck import CLIENT_LIMIT
from foretoken.bench.completion import StreamError
from foretoken.bench.load import Clients, running_clients
from foretoken.bench.measures import figures_of

DEMO = environment.ROOT / "models" / "demo"
NUM_CORES = 2
STREAMS = (1, 2, 4, 8, 16, 32)
NUM_ROUNDS = 5
# Requests of all streams in a round, and in one turn of an arm. A shared machine's speed jumps by
# 15% for seconds, so one arm after the other for 3 s each gave ratios that were off by more than a
# bar allows: 0.96 and 1.02 of one commit.
NUM_REQUESTS, TURN_REQUESTS = 128, 16
# Those of a fixed shape that runs alone.
SCREEN_REQUESTS = 64
PLAIN, AUTO = ARMS["plain"], ARMS["auto-ngram"]
FIXED = tuple(arm for arm in ARMS.values() if arm.is_fixed and arm.num_drafters == 1)
OVER_PLAIN, OVER_FIXED = 0.98, 0.95
STREAM_TIMEOUT_S = 300.0
WORKLOAD = ServingWorkload("cpu", 64, (PLAIN.name, AUTO.name, *(arm.name for arm in FIXED)), ())


class Turn(NamedTuple):
    """What one arm made in one turn."""

    num_tokens: int
    seconds: float


def tokens_per_s(turns: Sequence[Turn]) -> float:
    """Return the tokens a second of all turns together."""
    return sum(turn.num_tokens for turn in turns) / sum(turn.seconds for turn in turns)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Tokens a second at one number of streams. Entry i of each list is of round i."""

    num_streams: int
    # Each fixed shape once, alone.
    screened: dict[str, float]
    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    fixed: list[float] = field(default_factory=list)

    @property
    def best_fixed(self) -> str:
        """The name of the fastest fixed shape."""
        return max(self.screened, key=lambda name: self.screened[name])

    def over_plain(self) -> list[float]:
        """Return auto / plain of each round."""
        return [auto / plain for auto, plain in zip(self.auto, self.plain, strict=True)]

    def over_fixed(self) -> list[float]:
        """Return auto / best fixed shape of each round."""
        return [auto / fixed for auto, fixed in zip(self.auto, self.fixed, strict=True)]


class ServedLoad:
    """Measures all numbers of streams."""

    def __init__(self, launch: Launch, clients: Clients, num_rounds: int) -> None:
        self._launch, self._clients, self._num_rounds = launch, clients, num_rounds
        self._prompts = WORKLOAD.prompts(launch.model, SCREEN_REQUESTS)
        self.busiest = 0.0

    def measure(self, streams: Sequence[int]) -> list[Rounds]:
        """Return the rounds of each number of streams.

        Raises:
            StackError, StreamError, UnexpectedAnswerError: a server did not do what it should.
        """
        screened: dict[int, dict[str, float]] = {count: {} for count in streams}
        for arm in FIXED:
            with self._started(arm) as server:
                for count in streams:
                    screened[count][arm.name] = tokens_per_s([self._turn(arm, server, count, SCREEN_REQUESTS)])
        found = [Rounds(count, screened[count]) for count in streams]
        arms = [PLAIN, AUTO, *(ARMS[name] for name in dict.fromkeys(rounds.best_fixed for rounds in found))]
        for number in range(self._num_rounds):
            # Two servers of one arm differ by up to 2%, as they happen to lie in memory.
            with contextlib.ExitStack() as stack:
                servers = {arm.name: stack.enter_context(self._started(arm)) for arm in arms}
                for rounds in found:
                    self._take_turns(rounds, servers)
            progress(f"round {number + 1} of {self._num_rounds}")
        return found

    @contextlib.contextmanager
    def _started(self, arm: Arm) -> Iterator[ArmServer]:
        with self._launch.start(arm) as server:
            if server.attached_s is None:
                raise StackError(f"{arm.name}: not all drafters are attached")
            self._turn(arm, server, 2, TURN_REQUESTS)
            yield server

    def _take_turns(self, rounds: Rounds, servers: dict[str, ArmServer]) -> None:
        """Measure a round: the arms in turns, the best fixed shape in every second one."""
        lists = {PLAIN.name: rounds.plain, AUTO.name: rounds.auto, rounds.best_fixed: rounds.fixed}
        turns: dict[str, list[Turn]] = {name: [] for name in lists}
        for number in range(NUM_REQUESTS // max(TURN_REQUESTS, rounds.num_streams)):
            names = (PLAIN.name, AUTO.name, rounds.best_fixed) if number % 2 == 0 else (AUTO.name, PLAIN.name)
            for name in names:
                turn = self._turn(ARMS[name], servers[name], rounds.num_streams, TURN_REQUESTS, number)
                turns[name].append(turn)
        for name, rates in lists.items():
            rates.append(tokens_per_s(turns[name]))
        progress(
            f"{rounds.num_streams} streams: " + ", ".join(f"{name} {rates[-1]:.0f}" for name, rates in lists.items())
        )

    def _turn(self, arm: Arm, server: ArmServer, num_streams: int, num_requests: int, number: int = 0) -> Turn:
        """Run about ``num_requests`` requests, and one of each stream at least.

        Turns of other numbers begin with other prompts.
        """
        first = number * num_requests % len(self._prompts)
        requests = Requests(WORKLOAD, self._prompts[first:] + self._prompts[:first], arm.body)
        count = max(num_requests // num_streams, 1)
        load = self._clients.run(server.address, requests.closed(LoadPoint(num_streams), count), STREAM_TIMEOUT_S)
        WORKLOAD.check(load.answers)
        self.busiest = max(self.busiest, load.busiest)
        figures = figures_of(load.answers)
        return Turn(figures["num_tokens"], figures["seconds"])


def figures_of_rounds(found: Sequence[Rounds]) -> list[Figure]:
    """Return the two ratios of each number of streams."""
    figures = []
    formula = "tok/s over tok/s; median of the rounds (least to most)"
    for rounds in found:
        streams = f"{rounds.num_streams} stream{'s' if rounds.num_streams > 1 else ''}"
        for name, ratios, limit in (
            ("plain", rounds.over_plain(), OVER_PLAIN),
            (rounds.best_fixed, rounds.over_fixed(), OVER_FIXED),
        ):
            bar = Bar("at least", limit)
            figures.append(Figure(f"auto / {name}, {streams}", median(ratios), "x", formula, bar, tuple(ratios)))
    return figures


def to_markdown(found: Sequence[Rounds]) -> str:
    """Return a table of tokens a second: the rounds' medians, and each fixed shape alone."""
    names = [arm.name for arm in FIXED]
    lines = ["| streams | plain | auto | best fixed | " + " | ".join(f"{name}, alone" for name in names) + " |"]
    lines.append("| ---: | ---: | ---: | ---: |" + " ---: |" * len(names))
    for rounds in found:
        alone = " | ".join(f"{rounds.screened[name]:.0f}" for name in names)
        lines.append(
            f"| {rounds.num_streams} | {median(rounds.plain):.0f} | {median(rounds.auto):.0f} | "
            f"{median(rounds.fixed):.0f} | {alone} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.served_load", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, to see that all works; no bar is judged")
    parser.add_argument("--streams", type=numbers, default=list(STREAMS), help="numbers of streams, by commas")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    began = time.monotonic()
    used = take_cores(NUM_CORES)
    launch = Launch(DEMO / "target", DEMO / "eagle3", max_running=max(options.streams))
    try:
        with running_clients(1) as clients:
            measured = ServedLoad(launch, clients, 1 if options.quick else NUM_ROUNDS)
            found = measured.measure(options.streams)
    except (StackError, StreamError, UnexpectedAnswerError) as error:
        sys.exit(f"failed: {error}")
    facts = environment.facts("benchmarks.served_load", used, began) | {
        "client": f"at most {measured.busiest:.0%} of a core"
        + (": IT MAY BE THE LIMIT" if measured.busiest > CLIENT_LIMIT else ""),
    }
    figures = figures_of_rounds(found)
    if options.output is not None:
        content = facts | {"rounds": [asdict(rounds) for rounds in found], "figures": list(map(asdict, figures))}
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"- {name}: {text}" for name, text in facts.items()))
    print(f"\n{to_markdown(found)}\n{figures_table(figures, judged=not options.quick)}")
    finish([] if options.quick else missed_bars(figures), judged=not options.quick)


if __name__ == "__main__":
    main()
