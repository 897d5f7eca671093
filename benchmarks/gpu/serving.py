"""Measure a served load over HTTP, and vLLM under the same load.

    python -m benchmarks.gpu.serving --output FOLDER --widened WIDE --workload core
    python -m benchmarks.gpu.serving --output FOLDER --widened WIDE --workload core --arms plain,auto --concurrency 1,16

Each arm (benchmarks/arms.py) is a server of its own, started once; each point of the workload
(benchmarks/workloads.py) is a row. Requests are streamed, greedy, of fixed length, and
have nothing cached. A row is written as soon as it is measured. The same command again measures
only the rows that are missing.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arm_server import ArmServer, Launch
from benchmarks.arms import ARMS, Arm
from benchmarks.command import finish, numbers, progress
from benchmarks.environment import ROOT
from benchmarks.gpu.provenance import run_facts
from benchmarks.gpu.serving_figure import draw
from benchmarks.gpu.serving_result import Row, ServingResult
from benchmarks.gpu.utilization import sampled
from benchmarks.measure import UnexpectedAnswerError
from benchmarks.stack import StackError
from benchmarks.workloads import ODD_GROUP, WORKLOADS, LoadPoint, Requests, ServingWorkload
from foretoken.bench.bottleneck import CLIENT_LIMIT
from foretoken.bench.completion import StreamError
from foretoken.bench.counters import counters, increase, tokens_per_step, total
from foretoken.bench.load import Clients, default_clients, running_clients
from foretoken.bench.measures import figures_of

MAX_RUNNING = 256
# Streams of the warm-up before a row, as many as the row's at most, with one request each.
WARM_UP_STREAMS = 16
STREAM_TIMEOUT_S = 300.0
MAKERS = {"widened": "benchmarks.gpu.widen", "random": "benchmarks.gpu.checkpoint"}


@dataclass(frozen=True, slots=True)
class ServingMeasurement:
    """How all rows of one workload are measured.

    Attributes:
        num_requests: of each closed stream of most loads.
        seconds: length of Poisson arrivals.
        best_tokens_per_s: the rate that a Poisson point takes its percent of.
    """

    workload: ServingWorkload
    launch: Launch
    clients: Clients
    num_requests: int
    seconds: float = 20.0
    best_tokens_per_s: float = 0.0

    def rate(self, point: LoadPoint) -> float:
        """Return a point's arrivals a second; 0.0 for a closed load."""
        return point.percent / 100 * self.best_tokens_per_s / self.workload.output_tokens

    def requests_a_stream(self, point: LoadPoint) -> int:
        return 1 if point.percent else point.times * self.num_requests

    def rows(self, arm: Arm, points: Sequence[LoadPoint]) -> Iterator[Row]:
        """Start the arm's server once and yield a row for each point.

        Raises:
            StackError, StreamError, UnexpectedAnswerError: the server did not do what it should.
        """
        count = max((point.concurrency * self.requests_a_stream(point) for point in points), default=0) or sys.maxsize
        requests = Requests(self.workload, self.workload.prompts(self.launch.model, count), arm.body)
        progress(f"{arm.name}: starting")
        more = self.workload.flags if arm.engine == "foretoken" else ()
        with self.launch.start(arm, more) as server:
            attached = (
                "drafters NOT attached" if server.attached_s is None else f"attached in {server.attached_s:.1f} s"
            )
            progress(f"{arm.name}: ready in {server.ready_s:.1f} s, {attached}")
            for point in points:
                yield self._row(arm, point, server, requests)

    def _row(self, arm: Arm, point: LoadPoint, server: ArmServer, requests: Requests) -> Row:
        warm_up = requests.closed(LoadPoint(min(point.concurrency or WARM_UP_STREAMS, WARM_UP_STREAMS)), 1)
        warm = self.clients.run(server.address, warm_up, STREAM_TIMEOUT_S)
        if point.percent:
            streams = requests.poisson(self.rate(point), self.seconds, f"{self.workload.name} {point.name}")
        else:
            streams = requests.closed(point, self.requests_a_stream(point))
        before = counters(server.address)
        with sampled() as samples:
            load = self.clients.run(server.address, streams, STREAM_TIMEOUT_S)
        rises = increase(before, counters(server.address))
        self.workload.check(load.answers)
        others = [answer for answer in load.answers if answer.group != ODD_GROUP]
        steps = total(rises, "engine_steps")
        row = {
            "arm": arm.name,
            "point": point.name,
            "concurrency": point.concurrency,
            "rate": self.rate(point),
            "requests_a_stream": self.requests_a_stream(point),
            **figures_of(others),
            "tokens_per_step": tokens_per_step(rises),
            "engine_step_ms": rises.get("step_time_us{phase=step}", 0.0) / 1e3 / steps if steps else None,
            "gpu_idle": samples.idle,
            "client_busy": load.busiest,
            "warm_up_gap_max_ms": figures_of(warm.answers)["gap_max_ms"],
            "ready_s": server.ready_s,
            "attached_s": server.attached_s,
            "flags": list(server.flags),
            "num_output_tokens": self.workload.output_tokens,
            "counters": rises,
        }
        progress(to_line(row))
        return row


def run(
    measurement: ServingMeasurement, arms: Sequence[Arm], points: Sequence[LoadPoint], result: ServingResult
) -> list[str]:
    """Measure the rows that are missing, and draw them; return a line for each arm that failed."""
    failures = []
    for arm in arms:
        missing = [
            point
            for point in points
            if not result.has(arm.name, point.name, measurement.requests_a_stream(point), measurement.rate(point))
        ]
        if not missing:
            progress(f"{measurement.workload.name}, {arm.name}: all rows are there")
            continue
        try:
            for row in measurement.rows(arm, missing):
                result.add(row)
                result.file.with_suffix(".svg").write_text(draw(result.content), encoding="utf-8")
        except (StackError, StreamError, UnexpectedAnswerError) as error:
            failures.append(f"{measurement.workload.name}, {arm.name}: {error}")
            progress(f"failed: {failures[-1]}")
    return failures


def to_line(row: Row) -> str:
    """Return one line with a row's figures."""
    idle = "GPU idle unknown (no nvidia-smi)" if row["gpu_idle"] is None else f"GPU idle {row['gpu_idle']:.0%}"
    parts = [
        f"{row['arm']} at {row['point']}: {row['tokens_per_s']:.0f} tok/s",
        f"TTFT {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} ms",
        f"TPOT {row['tpot_p50_ms']:.2f} / {row['tpot_p99_ms']:.2f} ms",
        f"gap p99 {row['gap_p99_ms']:.0f}, longest {row['gap_max_ms']:.0f} ms",
        f"good {row['good_requests_per_s']:.1f} requests/s ({row['good_share']:.0%})",
        f"{row['tokens_per_step']:.2f} tokens a step",
        idle,
    ]
    if row["client_busy"] > CLIENT_LIMIT:
        parts.append(f"a client was {row['client_busy']:.0%} busy: IT MAY BE THE LIMIT")
    return "; ".join(parts)


def to_markdown(content: dict[str, Any]) -> str:
    """Return a table with a line for each row; p50 / p99 where there are two numbers."""
    lines = [
        "| arm | load | tok/s | tok/s a user | TTFT ms | TPOT ms | gap p99, longest ms | good requests/s "
        "| tokens a step | GPU idle | client busy | ready, attached s |"
    ]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in content["rows"]:
        idle = "" if row["gpu_idle"] is None else f"{row['gpu_idle']:.0%}"
        attached = "never" if row["attached_s"] is None else f"{row['attached_s']:.1f}"
        lines.append(
            f"| {row['arm']} | {row['point']} | {row['tokens_per_s']:.0f} | {row['user_tokens_per_s']:.0f} "
            f"| {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} "
            f"| {row['tpot_p50_ms']:.2f} / {row['tpot_p99_ms']:.2f} "
            f"| {row['gap_p99_ms']:.0f}, {row['gap_max_ms']:.0f} | {row['good_requests_per_s']:.1f} "
            f"| {row['tokens_per_step']:.2f} | {idle} | {row['client_busy']:.0%} "
            f"| {row['ready_s']:.1f}, {attached} |"
        )
    return "\n".join(lines) + "\n"


def best_of(content: dict[str, Any]) -> float:
    """Return the most tokens a second of ``auto`` in the core workload; 0.0 without rows."""
    return max((row["tokens_per_s"] for row in content["rows"] if row["arm"] == "auto"), default=0.0)


def checkpoint(folder: Path, weights: str) -> Path:
    """Return the folder with target/ and eagle3/; make it if it is not there."""
    if not (folder / "target").is_dir():
        progress(f"making {folder} by {MAKERS[weights]}")
        subprocess.run([sys.executable, "-m", MAKERS[weights], "--output", str(folder)], check=True, cwd=ROOT)
    return folder


def chosen_arms(workload: ServingWorkload, names: Sequence[str], vllm_path: Path | None) -> list[Arm]:
    """Return the workload's arms that were asked for; without vLLM's packages not vLLM's.

    Raises:
        StackError: vLLM was asked for by name and has no packages.
    """
    arms = [ARMS[name] for name in workload.arms if not names or name in names]
    if vllm_path is not None:
        return arms
    left_out = [arm.name for arm in arms if arm.engine == "vllm"]
    if left_out and names:
        raise StackError(f"{', '.join(left_out)}: vLLM needs --vllm-path")
    if left_out:
        progress(f"{workload.name}: without --vllm-path, these arms are left out: {', '.join(left_out)}")
    return [arm for arm in arms if arm.engine != "vllm"]


def chosen_points(workload: ServingWorkload, options: argparse.Namespace) -> list[LoadPoint]:
    """Return the workload's points that were asked for."""
    return [
        point
        for point in workload.points
        if (not options.concurrency or point.percent or point.concurrency in options.concurrency)
        and (not options.percent or not point.percent or point.percent in options.percent)
    ]


def measure_workload(
    workload: ServingWorkload, options: argparse.Namespace, facts: dict[str, Any], clients: Clients
) -> list[str]:
    """Measure one workload and print its table; return a line for each failure.

    Raises:
        StackError, ValueError: it cannot be measured.
    """
    result = ServingResult(options.output, workload.name, facts)
    best = options.best_tokens_per_s
    points = chosen_points(workload, options)
    if not best and any(point.percent for point in points):
        best = best_of(ServingResult(options.output, "core", facts).content)
        if not best:
            raise StackError(f"rates need rows of auto in {options.output}, or --best-tokens-per-s")
    weights = checkpoint(options.widened if workload.weights == "widened" else options.random, workload.weights)
    # Absolute paths: a name without a slash would be looked up on the hub.
    launch = Launch(
        (weights / "target").resolve(),
        (weights / "eagle3").resolve(),
        options.max_running,
        tuple(shlex.split(options.serve_flags)),
        options.vllm_path.resolve() if options.vllm_path else None,
        options.logs,
    )
    measurement = ServingMeasurement(workload, launch, clients, options.requests, options.seconds, best)
    failures = run(measurement, chosen_arms(workload, options.arms, options.vllm_path), points, result)
    print(f"{workload.name}: {result.file}\n\n{to_markdown(result.content)}", flush=True)
    return failures


def parser() -> argparse.ArgumentParser:
    made = Path(tempfile.gettempdir())
    found = argparse.ArgumentParser(prog="benchmarks.gpu.serving", description=__doc__.splitlines()[0])
    found.add_argument("--output", type=Path, required=True, help="a folder for a JSON and a picture a workload")
    found.add_argument("--workload", type=_names(WORKLOADS), default=["core"], help=f"of {', '.join(WORKLOADS)}")
    found.add_argument("--arms", type=_names(ARMS), default=[], help=f"these alone, of {', '.join(ARMS)}")
    found.add_argument("--concurrency", type=numbers, default=[], help="these points of closed loads alone")
    found.add_argument("--percent", type=numbers, default=[], help="these points of Poisson arrivals alone")
    found.add_argument(
        "--requests",
        type=int,
        default=5,
        help="of each stream of a closed load; three times as many of the short ones at 4 and 16",
    )
    found.add_argument("--seconds", type=float, default=20.0, help="length of Poisson arrivals")
    found.add_argument("--best-tokens-per-s", type=float, default=0.0, help="of Poisson rates; 0: auto's best of core")
    found.add_argument("--widened", type=Path, default=made / "foretoken-widened", help="made if it is not there")
    found.add_argument("--random", type=Path, default=made / "foretoken-random", help="made if it is not there")
    found.add_argument("--vllm-path", type=Path, help="a folder with vLLM's packages")
    found.add_argument("--max-running", type=int, default=MAX_RUNNING, help="requests that a server runs at once")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--clients", type=int, default=default_clients(), help="client processes")
    found.add_argument("--logs", type=Path, help="a folder that keeps the servers' logs")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    return found


def _names(known: Any) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return found

    return names


def main() -> None:
    options = parser().parse_args()
    facts = run_facts("serving", options.commit)
    failures = []
    with running_clients(options.clients) as clients:
        for name in options.workload:
            try:
                failures += measure_workload(WORKLOADS[name], options, facts, clients)
            except (StackError, ValueError) as error:
                failures.append(f"{name}: {error}")
    finish(failures)


if __name__ == "__main__":
    main()
