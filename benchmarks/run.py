"""``make bench``: compare the stack with itself without speculation, and with transformers.

    python -m benchmarks.run [--quick] [--url http://127.0.0.1:8000] [--model FOLDER] [--threads N] [--output FILE]

It prints tables with every figure, its formula and its bar. The exit status is 1 if a bar is missed
or a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from benchmarks import environment, report
from benchmarks.command import finish, progress, take_cores
from benchmarks.figures import NGRAM, TooShortError, decode_rate, median, repeated_share
from benchmarks.measure import Bench, Pair, PairWorkload, ReferencePass, UnexpectedAnswerError, rate_of
from benchmarks.prompts import code_prompts, num_files, random_prompts
from benchmarks.reference import ReferenceFailedError, running_reference
from benchmarks.report import Bar, Figure, Report
from benchmarks.stack import StackError, describe, idle_share, running_stack
from foretoken.bench.client import Address, complete
from foretoken.bench.completion import StreamError
from verifier_svc.model.runner import default_threads

RESULTS = environment.ROOT / "benchmarks" / "results"
NUM_CORES = 2
NUM_STREAMS = 8
# Wait this long before measuring an idle stack: after requests it still cleans up.
SETTLE_S = 2.0
WARM_SALT_SUFFIX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run. Bars are judged at full size only."""

    num_pairs: int = 5
    num_prompts: int = 20
    num_tokens: int = 128
    num_reference_passes: int = 3
    num_rounds: int = 5
    idle_s: float = 10.0
    judged: bool = True


FULL = Plan()
QUICK = Plan(num_pairs=1, num_prompts=8, num_tokens=32, num_reference_passes=1, num_rounds=1, idle_s=2.0, judged=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """The raw results of a run."""

    code: PairWorkload
    random: PairWorkload
    code_pairs: list[Pair]
    random_pairs: list[Pair]
    warm_pair: Pair
    outputs: list[tuple[int, ...]]
    passes: list[ReferencePass]
    concurrent_rates: list[float]
    idle: float | None
    server: dict[str, Any]


def main() -> None:
    options = _parse()
    try:
        result = measure_all(options)
    except (StackError, StreamError, ReferenceFailedError, UnexpectedAnswerError, TooShortError) as error:
        sys.exit(f"failed: {error}")
    output = options.output or RESULTS / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(report.to_json(result))
    print(report.to_markdown(result))
    finish(result.failures(), judged=result.judged)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Measure speculative against plain decoding.")
    demo = environment.ROOT / "models" / "demo" / "target"
    parser.add_argument("--model", type=Path, default=demo, help="folder of the checkpoint (default: the demo model)")
    parser.add_argument("--url", type=Address.parse, help="a running server of the same model, instead of a new one")
    parser.add_argument("--threads", type=int, help="of server and references alike (default: the server's own)")
    parser.add_argument("--quick", action="store_true", help="a short run to see that all works; no bar is judged")
    parser.add_argument("--output", type=Path, help="the JSON file to write (default: dated, in benchmarks/results)")
    return parser.parse_args()


def measure_all(options: argparse.Namespace) -> Report:
    """Start the stack, measure it, and stop it."""
    began = time.monotonic()
    plan = QUICK if options.quick else FULL
    used = take_cores(NUM_CORES)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    code = PairWorkload("held-out code", code_prompts(tokenizer, plan.num_prompts), plan.num_tokens)
    random = PairWorkload("random identifiers", random_prompts(tokenizer, plan.num_prompts), plan.num_tokens, 1.0)
    threads = options.threads or default_threads()
    with _server(options, threads) as (address, root):
        measured = _measure(plan, options.model, threads, code, random, address, root)
    result = summarize(measured, judged=plan.judged)
    result.facts.update(environment.facts("benchmarks.run", f"{used}, {threads} threads", began))
    return result


@contextlib.contextmanager
def _server(options: argparse.Namespace, threads: int) -> Iterator[tuple[Address, psutil.Process | None]]:
    """Yield the server under test, and its supervisor if this run started it."""
    if options.url is not None:
        yield options.url, None
        return
    progress("starting foretoken serve")
    with running_stack(options.model, threads) as (address, root):
        yield address, root


def _measure(
    plan: Plan,
    model: Path,
    threads: int,
    code: PairWorkload,
    random: PairWorkload,
    address: Address,
    root: psutil.Process | None,
) -> Measured:
    server = describe(address)
    bench = Bench(functools.partial(complete, address), server["model"], progress)
    for workload in (code, random):
        bench.warm_up(workload)
    code_pairs = bench.pairs(code, plan.num_pairs)
    random_pairs = bench.pairs(random, plan.num_pairs)
    concurrent_rates = bench.concurrent(code, NUM_STREAMS, plan.num_rounds)
    salt = f"warm-{os.urandom(WARM_SALT_SUFFIX_BYTES).hex()}"
    outputs = bench.outputs(code, salt)
    warm_pair = bench.warm_pair(code, salt)
    idle = None
    if root is not None:
        progress(f"idle for {plan.idle_s:g} s")
        time.sleep(SETTLE_S)
        idle = idle_share(root, plan.idle_s)
    with (
        running_reference("engine", model, threads) as engine,
        running_reference("transformers", model, threads) as transformers,
    ):
        for reference in (engine, transformers):
            reference.generate(code.prompts[0].token_ids, plan.num_tokens)
        passes = [bench.references(code, outputs, engine, transformers) for _ in range(plan.num_reference_passes)]
    return Measured(code, random, code_pairs, random_pairs, warm_pair, outputs, passes, concurrent_rates, idle, server)


def summarize(measured: Measured, *, judged: bool) -> Report:
    """Return figures, rows and notes of a run."""
    plain = rate_of([sample for pair in measured.code_pairs for sample in pair.plain])
    cold = report.pair_rows(measured.code_pairs)
    cold += report.reference_rows(measured.passes, cold[0])
    cold.append(
        report.concurrent_row(NUM_STREAMS, measured.concurrent_rates, median(measured.concurrent_rates) / plain)
    )
    mismatches = report.mismatch_lines(measured.code.name, measured.code_pairs)
    mismatches += report.mismatch_lines(measured.random.name, measured.random_pairs)
    mismatches += report.mismatch_lines("warm history", [measured.warm_pair])
    return Report(
        facts=_facts(measured),
        cold=cold,
        random=report.pair_rows(measured.random_pairs),
        warm=report.pair_rows([measured.warm_pair]),
        figures=_figures(measured, plain),
        notes=_notes(measured),
        judged=judged,
        mismatches=mismatches,
        prompts=[{"source": each.source, "tokens": len(each.token_ids)} for each in measured.code.prompts],
    )


def _figures(measured: Measured, plain: float) -> list[Figure]:
    code = [pair.ratio for pair in measured.code_pairs]
    random = [pair.ratio for pair in measured.random_pairs]
    against = [decode_rate(one.served) / decode_rate(one.transformers) for one in measured.passes]
    streams = [rate / plain for rate in measured.concurrent_rates]
    added = [value for one in measured.passes for value in one.added_ms()]
    rate = "tok/s of n-gram / tok/s of plain; median of the pairs (least to most)"
    return [
        Figure("n-gram / plain, held-out code", median(code), "x", rate, Bar("at least", 1.3), tuple(code)),
        Figure("n-gram / plain, random identifiers", median(random), "x", rate, Bar("at least", 0.97), tuple(random)),
        Figure(
            "plain / transformers",
            median(against),
            "x",
            "tok/s of served plain decode / tok/s of transformers generate; median of the passes",
            Bar("at least", 1.0),
            tuple(against),
        ),
        Figure(
            f"{NUM_STREAMS} plain streams / one",
            median(streams),
            "x",
            "tokens that came while all streams were active / that time, over plain tok/s; median of the rounds",
            Bar("at least", 2.5),
            tuple(streams),
        ),
        Figure(
            "added by gateway and gRPC",
            median(added),
            "ms a step",
            "ms a token at the client - ms a token of the engine alone in a process; median over prompts and passes",
            Bar("below", 0.25),
            tuple(added),
        ),
        Figure(
            "idle stack",
            None if measured.idle is None else 100 * measured.idle,
            "% of one core",
            "CPU seconds of all processes / seconds without a request",
            Bar("below", 3.0),
        ),
    ]


def _facts(measured: Measured) -> dict[str, str]:
    (verifier,) = measured.server["verifiers"]
    drafters = ", ".join(f"{each['name']} over {each['transport']}" for each in verifier["drafters"])
    return {
        "model": f"{measured.server['model']}, {verifier['dtype']}, {verifier['mode']} mode",
        "drafters": drafters or "none",
        "prompts": f"{len(measured.code.prompts)} of {min(len(p.token_ids) for p in measured.code.prompts)} to "
        f"{max(len(p.token_ids) for p in measured.code.prompts)} tokens from {num_files(measured.code.prompts)} "
        f"held-out files, {measured.code.num_tokens} new tokens each, batch 1",
    }


def _notes(measured: Measured) -> list[str]:
    share = repeated_share(measured.outputs)
    num_equal = sum(one.num_equal_outputs for one in measured.passes)
    num_outputs = sum(len(one.transformers) for one in measured.passes)
    return [
        "tok/s = sum of (tokens - 1) / sum of (last token - first token) over the runs, at the client. "
        "First token: median from sending the request.",
        "Cold: each request has its own new cache_salt, so there is neither prefix cache nor n-gram history. "
        "Warm: each prompt was completed once before under the same salt.",
        "Tokens a step = tokens of all decode steps / decode steps, prefill excluded, mean over requests.",
        f"{100 * share:.1f}% of the output tokens lie in an {NGRAM}-gram that occurs twice or more in its output.",
        f"transformers made the same tokens for {num_equal} of {num_outputs} outputs.",
    ]


if __name__ == "__main__":
    main()
