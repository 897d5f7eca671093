"""Measure what the death of a drafter or a verifier costs running streams, and for how long.

    python -m benchmarks.gpu.checkpoint --output DIR
    python -m benchmarks.gpu.recovery --model DIR/target --drafter-head DIR/eagle3 --output FILE

It starts ``foretoken serve``, with and without MPS, and completes the same prompts again and again,
greedily, through the gateway. In the middle of a round one process gets a fault
(benchmarks.gpu.faults). Rounds go on until the stack has recovered. A restarted process finds
weights in the page cache and compiled kernels on disk, because its predecessor put them there.
Texts are compared with those of an undisturbed round: in strict mode a different text is a failure;
in fast mode near-ties may change. FILE is written again after each fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.arms import EAGLE3
from benchmarks.command import finish, progress
from benchmarks.figures import median
from benchmarks.gpu.disturbed import RECOVERY_TIMEOUT_S, Course, Subject
from benchmarks.gpu.faults import FAULTS, with_hooks
from benchmarks.gpu.pauses import longest_pause, pauses_after
from benchmarks.gpu.provenance import run_facts
from benchmarks.prompts import code_prompts
from benchmarks.stack import StackError, describe, running_stack
from foretoken.bench.completion import StreamedCompletion, StreamError
from foretoken.mps import PIPES

FORMAT = 1
READY_TIMEOUT_S = 600.0
# The figures of a row, and their names in the table.
FIGURES = {
    "next_token_ms": "next token, ms",
    "longest_pause_ms": "longest pause, ms",
    "attached_s": "attached, s",
    "drafted_s": "drafts used, s",
    "accepted_s": "drafts accepted, s",
    "well_s": "all well, s",
}


def measure(options: argparse.Namespace, mps: str, server: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row after each fault of one stack. Facts about the stack go into ``server``.

    Raises:
        StackError, StreamError: the stack or a stream did not do what it should.
    """
    # Absolute paths: a name without a slash would be looked up on the hub.
    model, head = options.model.resolve(), options.drafter_head.resolve()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [prompt.token_ids for prompt in code_prompts(tokenizer, max(options.batches))]
    log = options.output.with_suffix(f".mps-{mps}.log")
    progress(f"MPS {mps}: starting; its log is {log}")
    began = time.perf_counter()
    with running_stack(
        model,
        options.threads,
        serve_flags(options, head, mps),
        ready_timeout_s=READY_TIMEOUT_S,
        # An existing daemon may have other clients.
        environment={name: value for name, value in with_hooks(os.environ).items() if name != PIPES},
        log_file=log,
    ) as (address, root):
        server["start_s"] = time.perf_counter() - began
        served = describe(address)
        (verifier,) = served["verifiers"]
        server |= {name: verifier[name] for name in ("mode", "dtype", "device")}
        subject = Subject(address, root, served["model"], log, prompts, options.output_tokens)
        yield from _rows(subject, options, mps, verifier["mode"])


def serve_flags(options: argparse.Namespace, head: Path, mps: str) -> list[str]:
    """Return the flags of ``foretoken serve``. With exact tree shapes each step drafts."""
    steps, topk, tokens = map(str, options.tree)
    flags = ["--drafter", EAGLE3.format(head=head), "--mps", mps]
    flags += ["--speculative-num-steps", steps, "--speculative-eagle-topk", topk]
    flags += ["--speculative-num-draft-tokens", tokens, "--numerics", options.numerics]
    flags += ["--max-running-requests", str(max(options.batches)), "--request-timeout", f"{RECOVERY_TIMEOUT_S:g}"]
    if options.simulate_accept_length is not None:
        flags += ["--simulate-accept-length", f"{options.simulate_accept_length:g}"]
    return [*flags, *shlex.split(options.serve_flags)]


def _rows(subject: Subject, options: argparse.Namespace, mps: str, mode: str) -> Iterator[dict[str, Any]]:
    expected: dict[int, list[str]] = {}
    for batch in options.batches:
        # The first round captures graphs.
        for _ in range(2):
            expected[batch] = _texts(subject.round(batch))
    for fault in (fault for fault in FAULTS if fault.name in options.faults):
        for batch in options.batches:
            for repeat in range(options.repeats):
                undisturbed = subject.settle(batch, fault)
                course = subject.disturb(batch, fault)
                try:
                    row = {"mps": mps, "fault": fault.name, "batch": batch, "repeat": repeat, **figures(course)}
                except ValueError as error:
                    raise StackError(
                        f"{fault.name}: {error}: streams of {options.output_tokens} tokens are too short"
                    ) from error
                row["undisturbed_pause_ms"] = 1e3 * longest_pause(_arrivals(undisturbed[-1]))
                # After a comma the mode names options that make texts meaningless.
                if "," not in mode:
                    row["num_other_texts"] = _num_others(course.rounds, expected[batch])
                    row["num_other_undisturbed_texts"] = _num_others(undisturbed, expected[batch])
                row["num_undisturbed_texts"] = sum(map(len, undisturbed))
                progress(describe_row(row))
                yield row


def figures(course: Course) -> dict[str, Any]:
    """Return one fault's figures, counted from its first signal. None: not seen."""
    arrivals = [times for completions in course.rounds for times in _arrivals(completions)]
    pauses = pauses_after(arrivals, course.fault_at)
    back = dataclasses.asdict(course.back) | {"well_at": course.well_at}
    later = [each for completions in course.rounds[1:] for each in completions]
    return {
        "next_token_ms": 1e3 * pauses.next_token,
        "longest_pause_ms": 1e3 * pauses.longest,
        "longest_pause_began_ms": 1e3 * pauses.longest_began,
        # Only streams that began after the fault.
        "longest_first_token_ms": 1e3 * max((each.first_at - each.sent_at for each in later), default=0.0) or None,
        **{name.replace("_at", "_s"): at and at - course.fault_at for name, at in back.items()},
        "restarted": course.restarted,
        "num_resumes": sum(each.speculation.get("num_resumes", 0) for each in course.rounds[0]),
        "num_texts": sum(map(len, course.rounds)),
        "said": course.said,
    }


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median and worst of every figure over the repeats of each fault.

    A figure is None if a repeat has none.
    """
    found = []
    for key in dict.fromkeys((row["mps"], row["fault"], row["batch"]) for row in rows):
        same = [row for row in rows if (row["mps"], row["fault"], row["batch"]) == key]
        line: dict[str, Any] = dict(zip(("mps", "fault", "batch"), key, strict=True)) | {"num_repeats": len(same)}
        for name in (*FIGURES, "undisturbed_pause_ms"):
            values = [row[name] for row in same]
            line[name] = None if None in values else {"median": median(values), "worst": max(values)}
        line["restarted"] = sorted({name for row in same for name in row["restarted"]})
        for name in ("num_texts", "num_other_texts", "num_undisturbed_texts", "num_other_undisturbed_texts"):
            line[name] = sum(row[name] for row in same) if name in same[0] else None
        found.append(line)
    return found


def to_markdown(summary: Sequence[dict[str, Any]]) -> str:
    """Return a line for each fault: each figure's median, and the worst of several repeats."""
    headers = ["MPS", "fault", "batch", *FIGURES.values(), "undisturbed pause, ms", "new process"]
    headers += ["other texts", "undisturbed"]
    lines = [f"| {' | '.join(headers)} |", "| --- | --- |" + " ---: |" * (len(FIGURES) + 2) + " --- | --- | --- |"]
    for line in summary:
        cells = [line["mps"], line["fault"], str(line["batch"])]
        cells += [_cell(line, name) for name in (*FIGURES, "undisturbed_pause_ms")]
        cells.append(", ".join(line["restarted"]) or "none")
        for kind in ("texts", "undisturbed_texts"):
            others = line[f"num_other_{kind}"]
            cells.append("-" if others is None else f"{others} of {line[f'num_{kind}']}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(line: dict[str, Any], name: str) -> str:
    if line[name] is None:
        return "-"
    digits = 1 if name.endswith("_ms") else 2
    values = ("median", "worst") if line["num_repeats"] > 1 else ("median",)
    return " / ".join(f"{line[name][value]:.{digits}f}" for value in values)


def describe_row(row: dict[str, Any]) -> str:
    seen = [f"{header} {row[name]:.1f}" for name, header in FIGURES.items() if row[name] is not None]
    others = f"; {row['num_other_texts']} of {row['num_texts']} texts differ" if "num_other_texts" in row else ""
    return f"MPS {row['mps']}, {row['fault']}, batch {row['batch']}: {', '.join(seen)}{others}"


def _arrivals(completions: Sequence[StreamedCompletion]) -> list[list[float]]:
    return [[chunk.at for chunk in completion.chunks] for completion in completions]


def _texts(completions: Sequence[StreamedCompletion]) -> list[str]:
    return [completion.text for completion in completions]


def _num_others(rounds: Sequence[Sequence[StreamedCompletion]], expected: Sequence[str]) -> int:
    return sum(
        text != wanted for completions in rounds for text, wanted in zip(_texts(completions), expected, strict=True)
    )


def parser(has_gpu: bool) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.recovery", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the target's folder")
    found.add_argument("--drafter-head", type=Path, required=True, help="the EAGLE-3 head's folder")
    found.add_argument("--output", type=Path, required=True, help="a JSON file to write; the logs go beside it")
    modes = ("on", "off") if has_gpu else ("off",)
    found.add_argument("--mps", nargs="+", choices=modes, default=modes, help="as foretoken serve's, one after another")
    names = [fault.name for fault in FAULTS if has_gpu or not fault.needs_gpu]
    found.add_argument("--faults", nargs="+", choices=names, default=names, help="these alone")
    found.add_argument("--batches", nargs="+", type=int, default=(1,), help="streams at once, one after another")
    found.add_argument("--repeats", type=int, default=3)
    found.add_argument("--output-tokens", type=int, default=400, help="of each stream")
    found.add_argument("--tree", type=int, nargs=3, default=(5, 8, 32), metavar=("STEPS", "TOPK", "TOKENS"))
    found.add_argument("--simulate-accept-length", type=float, help="as foretoken serve's; texts mean nothing then")
    found.add_argument("--numerics", choices=("auto", "strict", "fast"), default="auto", help="as foretoken serve's")
    found.add_argument("--threads", type=int, default=0, help="as foretoken serve's; counts on a CPU")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    return found


def main() -> None:
    options = parser(torch.cuda.is_available()).parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "format": FORMAT,
        **run_facts("recovery", options.commit),
        "model": json.loads((options.model / "config.json").read_text()),
        "tree": "-".join(map(str, options.tree)),
        "output_tokens": options.output_tokens,
        "servers": {},
        "rows": rows,
        "failures": [],
    }

    def write() -> None:
        result["summary"] = summarize(rows)
        options.output.write_text(json.dumps(result, indent=1) + "\n")

    failures: list[str] = result["failures"]
    for mps in options.mps:
        server: dict[str, Any] = {}
        result["servers"][mps] = server
        try:
            for row in measure(options, mps, server):
                rows.append(row)
                write()
                if server["mode"] == "strict" and row["num_other_texts"]:
                    failures.append(f"MPS {mps}, {row['fault']}: texts differ in strict mode")
        except (StackError, StreamError) as error:
            # Go on: the other stack may succeed.
            failures.append(f"MPS {mps}: {error}")
            progress(failures[-1])
    write()
    print(to_markdown(result["summary"]))
    print(options.output)
    finish(failures)


if __name__ == "__main__":
    main()
