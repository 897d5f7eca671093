"""Measure the speed-up of a trained head at a large model's cost, end to end, on held-out code.

    python -m benchmarks.gpu.widen --output DIR
    python -m benchmarks.gpu.speedup --model DIR/target --drafter-head DIR/eagle3 --output FILE

The widened demo model (benchmarks.gpu.widen) writes the demo's text and accepts the demo's drafts,
at the cost of the larger shape. Nothing is simulated: each prompt is streamed through the gateway,
one at a time, alternately with and without drafts. In strict mode a different text is a failure. In
fast mode near-ties may change; they are counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.arms import EAGLE3
from benchmarks.command import finish, progress
from benchmarks.drafters import mean_tokens, per_position, step_ms
from benchmarks.figures import TooShortError, median
from benchmarks.gpu.provenance import run_facts
from benchmarks.measure import Bench, Pair, PairWorkload, UnexpectedAnswerError, rate_of
from benchmarks.prompts import code_prompts, num_files
from benchmarks.stack import StackError, describe, running_stack
from foretoken.bench.client import complete
from foretoken.bench.completion import StreamError

READY_TIMEOUT_S = 600.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all pairs with one tree shape.

    Raises:
        StackError, StreamError, UnexpectedAnswerError, TooShortError: the run gave no result.
    """
    # Absolute paths: a name without a slash would be looked up on the hub.
    model, head = options.model.resolve(), options.drafter_head.resolve()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    steps, topk, tokens = options.tree
    flags = ["--drafter", EAGLE3.format(head=head)]
    flags += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)]
    flags += ["--speculative-num-draft-tokens", str(tokens), *shlex.split(options.serve_flags)]
    code = PairWorkload(
        "held-out code",
        code_prompts(tokenizer, options.prompts),
        options.tokens,
        temperature=options.temperature,
        drafter="eagle3",
    )
    with running_stack(model, options.threads, flags, ready_timeout_s=READY_TIMEOUT_S) as (address, _):
        server = describe(address)
        bench = Bench(functools.partial(complete, address, timeout_s=READY_TIMEOUT_S), server["model"], progress)
        bench.warm_up(code)
        pairs = bench.pairs(code, options.pairs)
    return summary(pairs) | {
        "tree": "-".join(map(str, options.tree)),
        "temperature": options.temperature,
        "prompts": f"{len(code.prompts)} from {num_files(code.prompts)} held-out files, {code.num_tokens} tokens each",
        "mode": server["verifiers"][0]["mode"],
        "dtype": server["verifiers"][0]["dtype"],
    }


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """Return the figures of all pairs.

    Rates are tokens a second of one stream (benchmarks.figures.decode_rate).
    """
    plain = [sample for pair in pairs for sample in pair.plain]
    drafted = [sample for pair in pairs for sample in pair.speculative]
    return {
        "speedup": median([pair.ratio for pair in pairs]),
        "speedups": [pair.ratio for pair in pairs],
        "plain_tokens_per_s": rate_of(plain),
        "drafted_tokens_per_s": rate_of(drafted),
        "plain_ms_per_step": median([step_ms(sample) for sample in plain]),
        "drafted_ms_per_step": median([step_ms(sample) for sample in drafted]),
        "tokens_per_step": mean_tokens(drafted),
        "accepted_per_position": per_position(drafted),
        "num_outputs": len(plain),
        "num_other_texts": sum(len(pair.mismatches()) for pair in pairs),
    }


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.speedup", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the widened target's folder")
    found.add_argument("--drafter-head", type=Path, required=True, help="the widened EAGLE-3 head's folder")
    found.add_argument("--output", type=Path, required=True, help="a JSON file to write")
    found.add_argument("--tree", type=int, nargs=3, default=(5, 8, 32), metavar=("STEPS", "TOPK", "TOKENS"))
    found.add_argument("--prompts", type=int, default=20)
    found.add_argument("--tokens", type=int, default=128, help="of each output")
    found.add_argument("--pairs", type=int, default=3, help="times that all prompts are completed both ways")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--threads", type=int, default=0, help="as foretoken serve's; counts on a CPU")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    return found


def main() -> None:
    options = parser().parse_args()
    facts = run_facts("speedup", options.commit)
    try:
        figures = measure(options)
    except (StackError, StreamError, UnexpectedAnswerError, TooShortError) as error:
        sys.exit(f"failed: {error}")
    result = {
        **facts,
        "model": json.loads((options.model / "config.json").read_text()),
        **figures,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{figures['tree']}, temperature {figures['temperature']:g}, {figures['mode']} mode: "
        f"{figures['speedup']:.2f}x: {figures['drafted_tokens_per_s']:.0f} / "
        f"{figures['plain_tokens_per_s']:.0f} tok/s; "
        f"{figures['tokens_per_step']:.2f} tokens a step of {figures['drafted_ms_per_step']:.2f} ms against "
        f"{figures['plain_ms_per_step']:.2f} ms; {figures['num_other_texts']} of {figures['num_outputs']} texts differ"
    )
    finish(["texts differ in strict mode"] if figures["mode"] == "strict" and figures["num_other_texts"] else [])


if __name__ == "__main__":
    main()
