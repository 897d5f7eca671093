"""``make bench-serving-check``: hold the newest served loads against the bars.

    python -m benchmarks.gpu.serving_check [FOLDER]

Without FOLDER it judges the newest result of each workload on an H200 and on an H100. The exit
status is 0 if every bar is reached, 1 if one is missed, and 2 if rows are missing or cannot be
judged. An H100 is held against vLLM of the same run alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.arms import ARMS
from benchmarks.environment import ROOT
from benchmarks.gpu import serving_bars as bars
from benchmarks.gpu.check import CannotJudgeError, is_ancestor
from benchmarks.gpu.serving_result import FORMAT, Row
from benchmarks.workloads import NONE_ODD, ODD, VLLM_ARMS, WORKLOADS, ServingWorkload
from foretoken.bench.bottleneck import CLIENT_LIMIT

RESULTS = ROOT / "benchmarks" / "gpu" / "results"
AUTO_ARMS = ("auto", "auto-ngram")
# Arms that must not be slower than plain decode.
CHOOSING_ARMS = (*AUTO_ARMS, "ngram")
# Rates of arrivals that differ by more cannot be compared.
SAME_RATE = 0.01


@dataclass(frozen=True, slots=True)
class JudgedFigure:
    """One bar, its number, and whether it counts: ``gives_way`` says why it does not."""

    name: str
    value: float
    kind: Literal["at least", "at most"]
    limit: float
    goal: float | None = None
    gives_way: str = ""

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.kind == "at least" else self.value <= self.limit

    @property
    def verdict(self) -> str:
        if not self.holds:
            return f"gives way: {self.gives_way}" if self.gives_way else "**FAIL**"
        return "goal" if self.goal is not None and self.value >= self.goal else "pass"

    @property
    def is_missed(self) -> bool:
        return not self.holds and not self.gives_way


class Rows:
    """The rows of one run by workload, arm and point.

    It notes each one that is asked for in vain.
    """

    def __init__(self, results: dict[str, dict[str, Any]]) -> None:
        """``results``: the content of each workload's file, and the ``file``."""
        self._rows = {
            (workload, row["arm"], row["point"]): {**row, "run": result["file"].parent}
            for workload, result in results.items()
            for row in result["rows"]
        }
        self.missing: list[str] = []

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _, _ in self._rows))

    def all(self, workload: str | None = None) -> list[Row]:
        """Return the rows of a workload; without one, all rows."""
        return [row for (name, _, _), row in self._rows.items() if workload in (None, name)]

    def find(self, workload: str, arm: str, point: str) -> Row | None:
        """Return a row; None for one that is missing."""
        row = self._rows.get((workload, arm, point))
        if row is None:
            line = f"missing row: {workload}, {arm}, at {point}"
            if line not in self.missing:
                self.missing.append(line)
        return row

    def fastest(self, workload: str, arms: Iterable[str], point: str) -> Row | None:
        """Return the row with the most tokens a second of ``arms``; None if one is missing."""
        found = [self.find(workload, arm, point) for arm in arms]
        rows = [row for row in found if row is not None]
        return max(rows, key=lambda row: float(row["tokens_per_s"])) if len(rows) == len(found) else None


def judge(rows: Rows, gpu: str) -> list[JudgedFigure]:
    """Return all bars of a run on ``gpu`` ("H200" or "H100") whose rows are there."""
    found: list[JudgedFigure] = []
    for concurrency in bars.CONCURRENCIES[gpu]:
        found += _core_bars(rows, gpu, concurrency)
    if gpu == "H100":
        return found
    for name in ("long-1k", "long-8k", "mixed"):
        for point in WORKLOADS[name].points:
            found += _over_plain(rows, WORKLOADS[name], point.name)
            found += _over_fixed(rows, WORKLOADS[name], point.name)
            found += _gaps(rows, WORKLOADS[name], point.name, point.concurrency)
    for point in WORKLOADS["poisson"].points:
        found += _over_plain(rows, WORKLOADS["poisson"], point.name)
        found += _over_fixed(rows, WORKLOADS["poisson"], point.name)
        found += _longest_gaps(rows, WORKLOADS["poisson"], point.name)
        rows.fastest("poisson", VLLM_ARMS, point.name)
    for point in WORKLOADS["prefill"].points:
        row = rows.find("prefill", "plain", point.name)
        if row is not None:
            name = f"prefill, 1,000-token prompts at {point.name}: tokens/s"
            found.append(JudgedFigure(name, row["prompt_tokens_per_s"], "at least", bars.PREFILL_TOKENS_PER_S))
    for point in WORKLOADS["odd"].points:
        found += _longest_gaps(rows, WORKLOADS["odd"], point.name)
    return found + _beside_odd(rows) + _starts(rows)


def _core_bars(rows: Rows, gpu: str, concurrency: int) -> list[JudgedFigure]:
    core, point = WORKLOADS["core"], str(concurrency)
    found = []
    vllm = rows.fastest("core", VLLM_ARMS, point)
    auto = rows.find("core", "auto", point)
    if gpu == "H200":
        found += _absolute(rows, vllm, concurrency)
    if auto is not None and vllm is not None:
        ratio = auto["tokens_per_s"] / vllm["tokens_per_s"]
        found.append(JudgedFigure(f"core, auto / vLLM's best at {point}", ratio, "at least", bars.OVER_VLLM[gpu]))
        if concurrency <= bars.MOST_STREAMS:
            for key, what in (("ttft_p50_ms", "p50"), ("ttft_p99_ms", "p99")):
                ratio = auto[key] / vllm[key]
                name = f"core, TTFT {what} of auto / that of {vllm['arm']} at {point}"
                found.append(JudgedFigure(name, ratio, "at most", bars.TTFT_OVER_VLLM))
    found += _over_plain(rows, core, point)
    found += _over_fixed(rows, core, point)
    return found + _gaps(rows, core, point, concurrency)


def _absolute(rows: Rows, vllm: Row | None, concurrency: int) -> list[JudgedFigure]:
    found = []
    for arm, rates in bars.RATES.items():
        row = rows.find("core", arm, str(concurrency))
        if row is None:
            continue
        once = bars.VLLM_ONCE[concurrency]
        is_slow = vllm is not None and vllm["tokens_per_s"] < bars.SLOW_CARD * once
        gives_way = f"a slow card, vLLM made {vllm['tokens_per_s']:.0f} of {once:g}" if vllm and is_slow else ""
        rate = rates[concurrency]
        name = f"core, {arm} at {concurrency}: tok/s"
        found.append(JudgedFigure(name, row["tokens_per_s"], "at least", rate.must, rate.goal, gives_way))
    return found


def _over_plain(rows: Rows, workload: ServingWorkload, point: str) -> list[JudgedFigure]:
    plain = rows.find(workload.name, "plain", point)
    found = []
    for arm in CHOOSING_ARMS:
        row = rows.find(workload.name, arm, point) if arm in workload.arms else None
        if row is not None and plain is not None:
            ratio = row["tokens_per_s"] / plain["tokens_per_s"]
            found.append(JudgedFigure(f"{workload.name}, {arm} / plain at {point}", ratio, "at least", bars.OVER_PLAIN))
    return found


def _over_fixed(rows: Rows, workload: ServingWorkload, point: str) -> list[JudgedFigure]:
    fixed = rows.fastest(workload.name, [arm for arm in workload.arms if ARMS[arm].is_fixed], point)
    found = []
    for arm in AUTO_ARMS:
        row = rows.find(workload.name, arm, point) if arm in workload.arms else None
        if row is not None and fixed is not None:
            ratio = row["tokens_per_s"] / fixed["tokens_per_s"]
            name = f"{workload.name}, {arm} / {fixed['arm']} at {point}"
            found.append(JudgedFigure(name, ratio, "at least", bars.OVER_FIXED))
    return found


def _gaps(rows: Rows, workload: ServingWorkload, point: str, concurrency: int) -> list[JudgedFigure]:
    found = []
    for row in _served(rows, workload, point) if concurrency <= bars.MOST_STREAMS else ():
        most = bars.PREFILL_STEP_MS + bars.GAP_SLACK_MS
        name = f"{workload.name}, gap p99 of {row['arm']} at {point}: ms"
        found.append(JudgedFigure(name, row["gap_p99_ms"], "at most", most))
    return found + _longest_gaps(rows, workload, point)


def _longest_gaps(rows: Rows, workload: ServingWorkload, point: str) -> list[JudgedFigure]:
    found = []
    for row in _served(rows, workload, point):
        longest = max(row["gap_max_ms"], row["warm_up_gap_max_ms"])
        name = f"{workload.name}, longest gap of {row['arm']} at {point}: ms"
        found.append(JudgedFigure(name, longest, "at most", bars.LONGEST_GAP_MS))
    return found


def _served(rows: Rows, workload: ServingWorkload, point: str) -> list[Row]:
    """Return the rows of arms that have bars for gaps: a fixed shape only where all arms are."""
    own = [arm for arm in workload.arms if ARMS[arm].engine == "foretoken"]
    arms = [arm for arm in own if not ARMS[arm].is_fixed] or own
    found = [rows.find(workload.name, arm, point) for arm in arms]
    return [row for row in found if row is not None]


def _beside_odd(rows: Rows) -> list[JudgedFigure]:
    found = []
    (arm,) = WORKLOADS["odd"].arms
    points = {point.case: point.name for point in WORKLOADS["odd"].points}
    base = rows.find("odd", arm, points[NONE_ODD])
    for case in ODD:
        row = rows.find("odd", arm, points[case])
        if case == NONE_ODD or row is None or base is None:
            continue
        ratio = row["gap_p50_ms"] / base["gap_p50_ms"]
        found.append(
            JudgedFigure(f"odd, step of the others / without, {points[case]}", ratio, "at most", bars.BESIDE_ODD)
        )
    return found


def _starts(rows: Rows) -> list[JudgedFigure]:
    """Return the bars for starts, for each of foretoken's arms the slowest and the fastest one."""
    found = []
    ours = [row for row in rows.all() if ARMS[row["arm"]].engine == "foretoken"]
    for arm in dict.fromkeys(row["arm"] for row in ours):
        each = [row for row in ours if row["arm"] == arm]
        found.append(
            JudgedFigure(f"{arm}: seconds to ready", max(row["ready_s"] for row in each), "at most", bars.READY_S)
        )
        found += _warm_starts(rows, arm)
        if ARMS[arm].num_drafters:
            waits = [float("inf") if row["attached_s"] is None else row["attached_s"] - row["ready_s"] for row in each]
            name = f"{arm}: seconds from ready to drafters attached"
            found.append(JudgedFigure(name, max(waits), "at most", bars.ATTACH_S))
    return found


def _warm_starts(rows: Rows, arm: str) -> list[JudgedFigure]:
    """Return a bar for each run: its second start of an arm finds compiled kernels."""
    starts: dict[Path, dict[str, float]] = {}
    for workload in rows.workloads:
        for row in rows.all(workload):
            if row["arm"] == arm:
                starts.setdefault(row["run"], {})[workload] = row["ready_s"]
    return [
        JudgedFigure(
            f"{arm}: seconds to ready, fastest of {len(of_run)} starts in {run.name}",
            min(of_run.values()),
            "at most",
            bars.WARM_READY_S,
        )
        for run, of_run in starts.items()
        if len(of_run) > 1
    ]


def refusals(rows: Rows, is_known: Callable[[str], bool]) -> list[str]:
    """Return the reasons why rows cannot be judged."""
    reasons = []
    all_commits = set()
    for workload in rows.workloads:
        commits = _commits(rows.all(workload))
        if len(commits) > 1:
            reasons.append(f"{workload}: rows of several commits: {', '.join(sorted(commits))}")
        all_commits |= commits
    for commit in sorted(all_commits):
        if not commit or " " in commit:
            reasons.append(f"the commit is {commit or 'unknown'}: only what is committed can be measured again")
        elif not is_known(commit):
            reasons.append(f"commit {commit} is not an ancestor of HEAD")
    gpus = sorted({row["gpu"] for row in rows.all()})
    if len(gpus) > 1:
        reasons.append(f"rows of several GPUs: {', '.join(gpus)}")
    for row in rows.all():
        where = f"{row['arm']} at {row['point']}"
        if not row["rate"] and row["requests_a_stream"] < bars.LEAST_REQUESTS:
            reasons.append(f"{where}: {row['requests_a_stream']} requests a stream, not {bars.LEAST_REQUESTS}")
        if row["client_busy"] > CLIENT_LIMIT:
            reasons.append(f"{where}: a client was {row['client_busy']:.0%} busy and may be the limit")
    for point in sorted({row["point"] for row in rows.all() if row["rate"]}):
        rates = [row["rate"] for row in rows.all() if row["point"] == point]
        if max(rates) > (1 + SAME_RATE) * min(rates):
            reasons.append(f"arrivals at {point} differ: {min(rates):.1f} to {max(rates):.1f} a second")
    return reasons


def load(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return results by workload, each with its ``file``.

    Raises:
        CannotJudgeError: a file holds something else.
    """
    found = {}
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CannotJudgeError(f"{file}: {error}") from error
        if result.get("format") != FORMAT or result.get("workload") not in WORKLOADS:
            raise CannotJudgeError(f"{file} is no result of benchmarks.gpu.serving")
        found[result["workload"]] = result | {"file": file}
    return found


def files_of(folder: Path) -> list[Path]:
    """Return the files of a run. Raises CannotJudgeError if there is none."""
    files = sorted(folder.glob("serving-*.json"))
    if not files:
        raise CannotJudgeError(f"{folder} has no result")
    return files


def gpu_of(results: dict[str, dict[str, Any]]) -> str:
    """Return the kind of GPU that has bars. Raises CannotJudgeError for any other."""
    names = {row["gpu"] for result in results.values() for row in result["rows"]}
    kinds = {kind for kind in bars.CONCURRENCIES for name in names if kind in name}
    if len(kinds) != 1:
        raise CannotJudgeError(f"bars are for one of {', '.join(bars.CONCURRENCIES)}, not {', '.join(sorted(names))}")
    return kinds.pop()


def newest(results: Path) -> dict[str, list[Path]]:
    """Return the newest file of each workload, for each kind of GPU that has one of core.

    Others in ``results`` than serving-WORKLOAD.json are of special runs.
    """
    found: dict[str, dict[str, tuple[str, Path]]] = {}
    for workload in WORKLOADS:
        for file in sorted(results.rglob(f"serving-{workload}.json")):
            content = load([file]).get(workload)
            if content is None:
                raise CannotJudgeError(f"{file} is a result of another workload")
            for kind in (kind for kind in bars.CONCURRENCIES if kind in content["device"]["gpu"]):
                files = found.setdefault(kind, {})
                began_at = content["began_at"]
                if workload not in files or files[workload][0] < began_at:
                    files[workload] = (began_at, file)
    return {kind: [file for _, file in files.values()] for kind, files in found.items() if "core" in files}


def check(files: Sequence[Path], is_known: Callable[[str], bool] = is_ancestor) -> tuple[str, list[str], list[str]]:
    """Return a table of all bars, a line for each missed one, and a line for each error.

    Raises:
        CannotJudgeError: the files hold no results that have bars.
    """
    results = load(files)
    gpu, rows = gpu_of(results), Rows(results)
    found = judge(rows, gpu)
    lines = [f"{gpu}, by workload:", ""]
    lines += [f"- {workload}: {_origin(result)}" for workload, result in results.items()]
    lines += ["", "| bar | value | must | goal | |", "| --- | ---: | ---: | ---: | --- |"]
    for bar in found:
        goal = "" if bar.goal is None else f"{bar.goal:g}"
        lines.append(f"| {bar.name} | {_number(bar.value)} | {bar.kind} {bar.limit:g} | {goal} | {bar.verdict} |")
    missed = [f"{bar.name}: {_number(bar.value)}, must be {bar.kind} {bar.limit:g}" for bar in found if bar.is_missed]
    return "\n".join(lines) + "\n", missed, rows.missing + refusals(rows, is_known)


def _commits(rows: Iterable[Row]) -> set[str]:
    """Return the commits of foretoken's rows."""
    return {str(row["commit"]) for row in rows if ARMS[row["arm"]].engine == "foretoken"}


def _origin(result: dict[str, Any]) -> str:
    """Return the file of a result, and its commits."""
    file: Path = result["file"]
    return f"{file.parent.name}/{file.name}, commit {', '.join(sorted(_commits(result['rows'])))}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.serving_check", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a run's results; by default the newest ones")
    options = parser.parse_args(arguments)
    missed: list[str] = []
    errors: list[str] = []
    try:
        runs = {"": files_of(options.folder)} if options.folder else newest(RESULTS)
        if not options.folder:
            errors += [f"{RESULTS} has no core row of an {kind}" for kind in bars.CONCURRENCIES if kind not in runs]
        for files in runs.values():
            table, more_missed, more_errors = check(files)
            print(table)
            missed += more_missed
            errors += more_errors
    except (CannotJudgeError, OSError) as error:
        errors.append(str(error))
    for line in missed:
        print(f"FAIL: {line}")
    for line in errors:
        print(f"refused: {line}", file=sys.stderr)
    sys.exit(2 if errors else 1 if missed else 0)


if __name__ == "__main__":
    main()
