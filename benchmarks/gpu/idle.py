"""Measure how long the GPU is idle in a step of steady decode, and between which kernels.

    python -m benchmarks.gpu.idle --model DIR/target --drafter-head DIR/eagle3 --output FILE

It drives one ``foretoken verifier``, with the drafter inside, through its gRPC stream. The
verifier's process records the GPU's work (benchmarks.gpu.traced_verifier). Recording makes the gaps
between kernels longer, so steps are timed without it first:

    idle, recorded       1 - busy / recorded time of whole steps; an upper bound
    idle of a step       1 - busy time of a recorded step / time of a step without recording (medians)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import progress
from benchmarks.environment import ROOT
from benchmarks.figures import median
from benchmarks.gpu import bars
from benchmarks.gpu.bars import DecodingFlags
from benchmarks.gpu.provenance import keep, run_facts
from benchmarks.gpu.step_times import Arrivals
from benchmarks.gpu.steps import READY_TIMEOUT_S, StepsWorkload, enough_steps, serve_flags
from benchmarks.gpu.timeline import Timeline, TraceError, spans_of, timeline_of
from benchmarks.gpu.traced_verifier import DONE
from benchmarks.gpu.verifier_client import SessionClient
from benchmarks.stack import StackError

SETTINGS = ("plain", "chain 5-1-6", "tree 5-8-32")
BATCHES = (1, 16)
STOP_TIMEOUT_S = 60.0
# Rows in the tables of gaps and kernels, and characters of a kernel's name.
MOST_ROWS = 10
NAME_CHARS = 60


class Recorder:
    """A process of benchmarks.gpu.traced_verifier. It writes its recordings into ``folder``."""

    def __init__(self, child: subprocess.Popen[str], folder: Path) -> None:
        self._child, self._folder = child, folder

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def start(self) -> None:
        self._command("start")

    def stop(self) -> dict[str, Any]:
        """Return the Chrome trace of the time since ``start``."""
        file = self._folder / "trace.json"
        self._command(f"stop {file}")
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return trace

    def _command(self, line: str) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            print(line, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            raise StackError("the verifier has ended") from None
        if self._child.stdout.readline().strip() != DONE:
            raise StackError(f"the verifier did not {line.split()[0]} recording; its output says why")


@contextlib.contextmanager
def traced_verifier(model: Path, flags: Sequence[str]) -> Iterator[tuple[SessionClient, Recorder]]:
    """Start ``foretoken verifier`` with ``flags``; yield it when ready, with a connection.

    Raises:
        StackError: it did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/verifier.sock"
        command = [sys.executable, "-m", "benchmarks.gpu.traced_verifier", str(model), "--address", address]
        command += ["--log-level", "warning", *flags]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        recorder = Recorder(child, Path(folder))
        try:
            with SessionClient(address) as client:
                client.wait_ready(recorder.is_alive, READY_TIMEOUT_S)
                yield client, recorder
        finally:
            assert child.stdin is not None and child.stdout is not None
            # Their buffers are empty, because each line is flushed.
            child.stdin.close()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting and batch. Raises StackError or TraceError."""
    extra = ["--threads", str(options.threads), "--numerics", options.numerics, *shlex.split(options.verifier_flags)]
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    for setting in bars.SETTINGS:
        if setting.name not in options.settings:
            continue
        progress(f"{setting.name}: starting")
        num_tokens = math.ceil(options.steps * setting.accept_length)
        workload = StepsWorkload(vocab_size, options.prompt_tokens, num_tokens, options.min_steps, 0.0)
        flags = [*verifier_flags(setting, options.drafter_head.resolve(), max(options.batches)), *extra]
        with traced_verifier(options.model.resolve(), flags) as (client, recorder):
            # Time all batches before the first recording: the profiler may slow down what follows.
            untraced = [_untraced(client, setting, batch, workload) for batch in options.batches]
            for row in untraced:
                prompts = workload.prompts(row["batch"], "recorded")
                recorder.start()
                client.run(prompts, num_tokens)
                timeline = timeline_of(spans_of(recorder.stop()))
                found = row | figures(timeline, row["step_ms"])
                progress(to_line(found))
                yield found


def verifier_flags(setting: DecodingFlags, head: Path, batch: int) -> list[str]:
    """Return the flags of ``foretoken verifier``; a drafter without an address runs inside it."""
    flags = serve_flags(setting, head, in_process=True, batch=batch)
    for flag in ("--speculative-algorithm", "--drafter-placement"):
        if flag in flags:
            at = flags.index(flag)
            del flags[at : at + 2]
    return flags


def _untraced(client: SessionClient, setting: DecodingFlags, batch: int, workload: StepsWorkload) -> dict[str, Any]:
    name = f"{setting.name}, batch {batch}"

    def decode(seed: str) -> list[Arrivals]:
        return list(client.run(workload.prompts(batch, seed), workload.output_tokens))

    decode(f"warm-up {name}")
    before = client.info()
    times, _ = enough_steps(name, decode, setting.accept_length, workload.min_steps)
    after = client.info()
    return {
        "setting": setting.name,
        "batch": batch,
        "mode": after.mode.split(",")[0],
        "dtype": after.dtype,
        "step_ms": 1e3 * median(times.seconds),
        "tokens_per_step": times.tokens_per_step,
        "num_dropped": times.num_dropped,
        "num_steps": after.num_steps - before.num_steps,
        "num_resident_steps": after.num_resident_steps - before.num_resident_steps,
    }


def figures(timeline: Timeline, step_ms: float) -> dict[str, Any]:
    """Return the figures of a recording, beside the step time without recording."""
    return {
        "num_recorded_steps": len(timeline.step_us),
        "recorded_step_ms": median(timeline.step_us) / 1e3,
        "busy_ms": median(timeline.busy_us) / 1e3,
        "idle_share_recorded": timeline.idle_share,
        "idle_share": timeline.idle_share_of(1e3 * step_ms),
        "small_gaps_us": timeline.small_gaps_us,
        "num_small_gaps": timeline.num_small_gaps,
        "gaps": [share._asdict() for share in timeline.gaps],
        "work": [share._asdict() for share in timeline.work],
    }


def to_line(row: dict[str, Any]) -> str:
    verdict = "reached" if row["idle_share"] <= bars.MAX_IDLE else "missed"
    return (
        f"{row['setting']}, batch {row['batch']}: idle {row['idle_share']:.1%} of a step of {row['step_ms']:.3f} ms "
        f"(at most {bars.MAX_IDLE:.0%}: {verdict}); recorded {row['idle_share_recorded']:.1%} of "
        f"{row['recorded_step_ms']:.3f} ms, busy {row['busy_ms']:.3f} ms"
    )


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all rows, and for each row its largest gaps and longest kernels."""
    lines = [
        "| | batch | ms a step | busy | idle | ms a step, recorded | idle, recorded | gaps below 2 us |"
        " overlapped steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['setting']} | {row['batch']} | {row['step_ms']:.3f} | {row['busy_ms']:.3f} | "
            f"{row['idle_share']:.1%} | {row['recorded_step_ms']:.3f} | {row['idle_share_recorded']:.1%} | "
            f"{row['small_gaps_us']:.0f} us, {row['num_small_gaps']:.0f} x | "
            f"{row['num_resident_steps']} of {row['num_steps']} |"
        )
    for row in rows:
        for what in ("gaps", "work"):
            lines += ["", f"| {row['setting']}, batch {row['batch']}: {what} | us a step | times | longest, us |"]
            lines.append("| --- | ---: | ---: | ---: |")
            for share in row[what][:MOST_ROWS]:
                name = " -> ".join(part[:NAME_CHARS] for part in share["name"].split(" -> "))
                lines.append(
                    f"| {name} | {share['us_per_step']:.1f} | {share['count_per_step']:.1f} | "
                    f"{share['longest_us']:.1f} |"
                )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.idle", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the target's folder")
    found.add_argument("--drafter-head", type=Path, required=True, help="the EAGLE-3 head's folder")
    found.add_argument("--output", type=Path, required=True, help="a JSON file to write")
    found.add_argument("--threads", type=int, default=0, help="as foretoken verifier's; counts on a CPU")
    found.add_argument("--numerics", choices=("auto", "strict", "fast"), default="auto", help="of the target")
    found.add_argument("--verifier-flags", default="", help="more flags of foretoken verifier, as one word")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    found.add_argument("--prompt-tokens", type=int, default=bars.PROMPT_TOKENS)
    found.add_argument("--steps", type=int, default=64, help="of each batch")
    found.add_argument("--min-steps", type=int, default=bars.MIN_STEPS, help="step times without recording, at least")
    found.add_argument("--settings", nargs="+", choices=[s.name for s in bars.SETTINGS], default=SETTINGS)
    found.add_argument("--batches", nargs="+", type=int, choices=bars.BATCHES, default=BATCHES)
    return found


def main() -> None:
    options = parser().parse_args()
    try:
        rows = keep(measure(options), run_facts("idle", options.commit), options.output)
    except (StackError, TraceError) as error:
        sys.exit(f"failed: {error}")
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
