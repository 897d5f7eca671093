"""Measure decode steps through the real services, with a forced acceptance.

    python -m benchmarks.gpu.checkpoint --output DIR
    python -m benchmarks.gpu.steps --model DIR/target --drafter-head DIR/eagle3 --output benchmarks/gpu/results

For every row of benchmarks.gpu.bars it starts ``foretoken serve`` with
``--simulate-accept-length``, and decodes batches of random prompts through the verifier's gRPC
stream or the gateway. The text has no meaning. A step's time is the time between two arrivals of
one sequence's tokens. One run writes a JSON file with all step times, and a picture. After each row
it saves the rows so far (.unfinished).

``--dtype bfloat16 float16`` makes a run of each type, and fails if a row of the second takes over
2% longer than the first's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arms import EAGLE3
from benchmarks.command import finish, progress
from benchmarks.figures import median
from benchmarks.gpu import bars
from benchmarks.gpu.bars import DecodingFlags, Key, required_rows
from benchmarks.gpu.figure import draw
from benchmarks.gpu.floor import StepBytes, step_bytes
from benchmarks.gpu.provenance import run_facts
from benchmarks.gpu.step_times import Arrivals, MeasuredSteps, step_times
from benchmarks.gpu.verifier_client import SessionClient
from benchmarks.stack import StackError, describe, running_stack, service
from foretoken.bench.client import Address, complete
from foretoken.bench.completion import StreamError

FORMAT = 1
READY_TIMEOUT_S = 600.0
MOST_ROUNDS = 100
# A step's time over that of the first element type.
MOST_OVER_FIRST = 1.02

# Decodes prompts, and returns the arrivals of each.
Decode = Callable[[Sequence[Sequence[int]]], list[Arrivals]]


@dataclass(frozen=True, slots=True)
class StepsWorkload:
    """What every row decodes. Prompts are random ids below ``vocab_size``."""

    vocab_size: int
    prompt_tokens: int
    output_tokens: int
    min_steps: int
    temperature: float

    def prompts(self, count: int, seed: str) -> list[list[int]]:
        """Return ``count`` prompts from ``seed``, without the lowest ids, which are special."""
        generator = random.Random(seed)
        return [[generator.randrange(16, self.vocab_size) for _ in range(self.prompt_tokens)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Server:
    """A running stack. ``environ`` is the verifier's environment."""

    rest: Address
    verifier: str
    name: str
    environ: dict[str, str]


def measure(
    model: Path, head: Path, keys: Sequence[Key], workload: StepsWorkload, threads: int, extra: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows. Each stack starts once, with ``extra`` flags of ``foretoken serve``.

    Raises:
        StackError, StreamError: a stack or a stream did not do what it should.
    """
    sizes = step_bytes(model, head)
    for setting in bars.SETTINGS:
        for in_process in (False, True):
            wanted = [key for key in keys if key.setting == setting.name and (key.path == "in-process") == in_process]
            if not wanted:
                continue
            flags = [*serve_flags(setting, head, in_process=in_process, batch=max(k.batch for k in wanted)), *extra]
            what = f"{setting.name}{', drafter in process' if in_process else ''}"
            with served(what, model, threads, flags, num_drafters=0 if setting.is_plain else 1) as server:
                for key in wanted:
                    yield _row(key, setting, server, workload, sizes)


def serve_flags(setting: DecodingFlags, head: Path, *, in_process: bool, batch: int) -> list[str]:
    """Return the flags of ``foretoken serve`` for one setting."""
    flags = ["--max-running-requests", str(batch), "--disable-radix-cache"]
    if setting.is_plain:
        return [*flags, "--speculative-algorithm", "NONE"]
    flags += ["--drafter", EAGLE3.format(head=head)]
    flags += ["--drafter-placement", "in-process" if in_process else "process"]
    flags += ["--speculative-num-steps", str(setting.steps), "--speculative-eagle-topk", str(setting.topk)]
    flags += ["--speculative-num-draft-tokens", str(setting.tokens)]
    return [*flags, "--simulate-accept-length", f"{setting.accept_length:g}"]


@contextlib.contextmanager
def served(what: str, model: Path, threads: int, flags: Sequence[str], *, num_drafters: int) -> Iterator[Server]:
    """Start ``foretoken serve`` for ``what``, and yield it when it is ready. Raises StackError."""
    progress(f"{what}: starting")
    began = time.perf_counter()
    with running_stack(model, threads, flags, num_drafters=num_drafters, ready_timeout_s=READY_TIMEOUT_S) as (
        address,
        root,
    ):
        progress(f"{what}: ready in {time.perf_counter() - began:.1f} s")
        verifier = service(root, "verifier")
        words = verifier.cmdline()
        yield Server(address, words[words.index("--address") + 1], describe(address)["model"], verifier.environ())


def enough_steps(
    name: str, decode: Callable[[str], list[Arrivals]], accept_length: float, min_steps: int
) -> tuple[MeasuredSteps, int]:
    """Decode batches until there are ``min_steps`` steps; return them and the number of batches.

    Args:
        decode: decodes one batch. It takes a seed, a different one for each batch.
        accept_length: average tokens of a step of the batch's first sequence.

    Raises:
        StackError: the batches have hardly any steps.
    """
    times = MeasuredSteps()
    for number in range(MOST_ROUNDS):
        times.extend(step_times(decode(f"{number} {name}"), accept_length))
        if len(times.seconds) >= min_steps:
            return times, number + 1
    raise StackError(f"{name}: only {len(times.seconds)} steps in {MOST_ROUNDS} batches")


def _row(key: Key, setting: DecodingFlags, server: Server, workload: StepsWorkload, sizes: StepBytes) -> dict[str, Any]:
    """Warm up, decode batches until there are enough steps, and return the figures."""
    with SessionClient(server.verifier) as client:

        def at_verifier(prompts: Sequence[Sequence[int]]) -> list[Arrivals]:
            return list(client.run(prompts, workload.output_tokens, temperature=workload.temperature))

        def at_gateway(prompts: Sequence[Sequence[int]]) -> list[Arrivals]:
            return _through_gateway(server, prompts, workload)

        decode: Decode = at_gateway if key.path == "gateway" else at_verifier
        decode(workload.prompts(key.batch, f"warm-up {key}"))
        before, began = client.info(), time.perf_counter()
        times, num_rounds = enough_steps(
            str(key),
            lambda seed: decode(workload.prompts(key.batch, seed)),
            setting.accept_length,
            workload.min_steps,
        )
        took, after = time.perf_counter() - began, client.info()
    steps = after.num_steps - before.num_steps
    step_ms = 1e3 * median(times.seconds)
    context = workload.prompt_tokens + workload.output_tokens // 2
    row = {
        **dataclasses.asdict(key),
        **{name: getattr(setting, name) for name in ("steps", "topk", "tokens")},
        "simulate_accept_length": None if setting.is_plain else setting.accept_length,
        "mode": after.mode.split(",")[0],
        "dtype": after.dtype,
        "model_fingerprint": after.model_fingerprint,
        "drafters": {drafter.name: drafter.transport for drafter in after.drafters},
        # Without MPS the variable names a folder that does not exist.
        "mps": Path(server.environ.get("CUDA_MPS_PIPE_DIRECTORY", "none")).is_dir(),
        "median_ms": step_ms,
        "tokens_per_step": times.tokens_per_step,
        "tokens_per_s": key.batch * times.tokens_per_step / step_ms * 1e3,
        "floor_bytes": sizes.of_step(setting.steps, key.batch, context),
        "num_dropped": times.num_dropped,
        "num_fallback_steps": after.num_fallback_steps - before.num_fallback_steps,
        "num_rounds": num_rounds,
        "seconds": took,
        # The verifier's own times of all steps meanwhile, prefill included.
        "phases_ms": {
            phase: (after.step_time_us[phase] - before.step_time_us[phase]) / 1e3 / max(steps, 1)
            for phase in sorted(after.step_time_us)
        },
        "step_ms": [round(1e3 * seconds, 5) for seconds in times.seconds],
    }
    progress(
        f"{key}: {step_ms:.3f} ms a step, {times.tokens_per_step:.2f} tokens, {row['tokens_per_s']:.0f} tok/s; "
        f"{times.num_dropped} intervals dropped, {row['num_fallback_steps']} steps without a draft"
    )
    return row


def _through_gateway(server: Server, prompts: Sequence[Sequence[int]], workload: StepsWorkload) -> list[Arrivals]:
    bodies = [
        {
            "model": server.name,
            "prompt": list(prompt),
            "max_tokens": workload.output_tokens,
            "temperature": workload.temperature,
            "seed": index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": uuid.uuid4().hex,
        }
        for index, prompt in enumerate(prompts)
    ]
    found: list[Arrivals] = []
    for completion in complete(server.rest, bodies, READY_TIMEOUT_S):
        found.append([(chunk.at, chunk.num_tokens) for chunk in completion.chunks if chunk.num_tokens is not None])
        if not found[-1]:
            raise StreamError("the gateway sends no running usage totals")
    return found


def run(options: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON's content of one element type after each row.

    Raises StackError if there is nothing to measure.
    """
    keys = [
        key
        for key in required_rows()
        if key.setting in options.settings and key.batch in options.batches and key.path in options.paths
    ]
    if not keys:
        raise StackError("no row has these settings, batches and paths together")
    config = json.loads((options.model / "config.json").read_text())
    workload = StepsWorkload(
        config["vocab_size"], options.prompt_tokens, options.output_tokens, options.min_steps, options.temperature
    )
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "format": FORMAT,
        "invocation": uuid.uuid4().hex,
        **run_facts("steps", options.commit),
        "workload": dataclasses.asdict(workload),
        "numerics": options.numerics,
        "model": config,
        "drafter_head": json.loads((options.drafter_head / "config.json").read_text()),
        "rows": rows,
    }
    extra = ["--numerics", options.numerics, "--dtype", dtype, *shlex.split(options.serve_flags)]
    device = result["device"]
    common = {"invocation": result["invocation"], "commit": result["commit"], "gpu": device["gpu"]}
    model, head = options.model.resolve(), options.drafter_head.resolve()
    for row in measure(model, head, keys, workload, options.threads, extra):
        floor_ms = 1e3 * row["floor_bytes"] / device["bandwidth"]
        rows.append(row | common | {"floor_ms": floor_ms, "floor_share": floor_ms / row["median_ms"]})
        yield result


def to_markdown(result: dict[str, Any]) -> str:
    """Return a table with a line for each row."""
    lines = ["| | batch | path | ms a step | tok/s | tokens a step | share of floor | where the time went, ms |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |")
    for row in result["rows"]:
        phases = ", ".join(f"{phase} {ms:.2f}" for phase, ms in row["phases_ms"].items())
        lines.append(
            f"| {row['setting']} | {row['batch']} | {row['path']} | {row['median_ms']:.3f} | "
            f"{row['tokens_per_s']:.0f} | {row['tokens_per_step']:.2f} | {row['floor_share']:.0%} | {phases} |"
        )
    return "\n".join(lines) + "\n"


def compare(results: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return a table of the first result's medians with each other one's, and the missed bars."""
    lines = ["| | batch | path | ms a step | of | ms a step | of | ratio |"]
    lines.append("| --- | ---: | --- | ---: | --- | ---: | --- | ---: |")
    missed = []
    first, *others = ({_name(row): row for row in result["rows"]} for result in results)
    for rows in others:
        for name, row in rows.items():
            before = first[name]
            ratio = row["median_ms"] / before["median_ms"]
            lines.append(
                f"| {' | '.join(map(str, name))} | {before['median_ms']:.3f} | {before['dtype']} | "
                f"{row['median_ms']:.3f} | {row['dtype']} | {ratio:.3f} |"
            )
            if ratio > MOST_OVER_FIRST:
                missed.append(f"{name}: {row['dtype']} takes {ratio:.3f} of {before['dtype']}'s time")
    return "\n".join(lines) + "\n", missed


def _name(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["setting"], row["batch"], row["path"]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.steps", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the target's folder")
    found.add_argument("--drafter-head", type=Path, required=True, help="the EAGLE-3 head's folder")
    found.add_argument("--output", type=Path, required=True, help="a folder for the JSON and the picture")
    found.add_argument("--threads", type=int, default=0, help="as foretoken serve's; counts on a CPU")
    found.add_argument("--numerics", choices=("auto", "strict", "fast"), default="auto", help="as foretoken serve's")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    found.add_argument("--dtype", nargs="+", choices=dtypes, default=["auto"], help="a run of each, to compare")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    found.add_argument("--prompt-tokens", type=int, default=bars.PROMPT_TOKENS)
    found.add_argument("--output-tokens", type=int, default=bars.OUTPUT_TOKENS)
    found.add_argument("--min-steps", type=int, default=bars.MIN_STEPS, help="step times of a row at least")
    names = [setting.name for setting in bars.SETTINGS]
    found.add_argument("--settings", nargs="+", choices=names, default=names, help="these rows alone")
    found.add_argument("--batches", nargs="+", type=int, choices=bars.BATCHES, default=bars.BATCHES)
    found.add_argument("--paths", nargs="+", choices=bars.PATHS, default=bars.PATHS)
    return found


def main() -> None:
    options = parser().parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = [measured(options, dtype) for dtype in options.dtype]
    if len(results) > 1:
        table, missed = compare(results)
        print(table)
        finish(missed)


def measured(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Write the files of one element type, print its table and return the JSON's content.

    Exits with 1 if there is nothing to measure, or a stack does not do what it should.
    """
    try:
        for result in run(options, dtype):
            stem = result["began_at"].replace(":", "").replace("+0000", "Z")
            file = options.output / f"steps-{stem}.json"
            # An unfinished run is no result: only complete files are searched for the newest one.
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(result, indent=1) + "\n")
    except (StackError, StreamError) as error:
        sys.exit(f"failed: {error}")
    unfinished.replace(file)
    draw(result, file.with_suffix(".png"))
    print(to_markdown(result))
    print(f"{file}; bars are judged by: python -m benchmarks.gpu.check {file}")
    return result


if __name__ == "__main__":
    main()
