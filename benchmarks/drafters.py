"""``make bench-drafters``: measure each drafter of the demo model, and the server's own choice.

    python -m benchmarks.drafters [--quick] [--output FILE]

It prints tables with every figure, its formula and its bar. The exit status is 1 if a bar is missed
or a text differs. It uses the prompts and cold runs of ``make bench`` (benchmarks/run.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import arms, environment
from benchmarks.command import finish, progress, take_cores
from benchmarks.figures import NGRAM, TooShortError, median, repeated_share
from benchmarks.measure import Bench, Pair, PairWorkload, TimedCompletion, UnexpectedAnswerError
from benchmarks.prompts import code_prompts
from benchmarks.report import Bar, Figure, figures_table, missed_bars
from benchmarks.stack import StackError, describe, running_stack
from foretoken.bench.client import complete
from foretoken.bench.completion import StreamError
from models.demo.frequent_tokens import write_token_map

DEMO = environment.ROOT / "models" / "demo"
NUM_CORES = 2
NUM_PROMPTS = 20
NUM_TOKENS = 128
NUM_PAIRS = 5
# A quarter of the target's 8,192 token ids, as in FR-Spec.
TOKEN_MAP_SIZE = 2048
# A prompt counts as repeated code from this share of its output's tokens in repeated 8-grams.
REPEATED = 0.5
TREE = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16")
CHAIN = ("--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5")
HEAD = arms.EAGLE3.format(head=DEMO / "eagle3")
SERVED = (
    *("--drafter", f"{HEAD},token_map={DEMO / 'token_map.safetensors'}"),
    *("--drafter", arms.NGRAM),
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The acceptance of one way of drafting over all prompts.

    ``per_position[k]``: accepted tokens at depth k + 1 / steps that drafted.
    """

    name: str
    shape: str
    temperature: float
    tokens_per_step: float
    per_position: tuple[float, ...]
    ms_per_step: float


@dataclass(frozen=True, slots=True)
class Result:
    """Everything in the report."""

    facts: dict[str, str]
    accepted: list[Accepted]
    pairs: list[Pair]
    figures: list[Figure]
    mismatches: list[str]
    judged: bool

    def failures(self) -> list[str]:
        """Return the reasons why the run fails.

        Texts must always be equal; bars count in a judged run.
        """
        return [*self.mismatches, *(missed_bars(self.figures) if self.judged else ())]


class DrafterMeasurement:
    """Runs the stacks one after the other and keeps the results."""

    def __init__(self, num_prompts: int, num_tokens: int, num_pairs: int) -> None:
        tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
        self._code = PairWorkload("held-out code", code_prompts(tokenizer, num_prompts), num_tokens)
        self._num_pairs = num_pairs
        # 0: the server chooses.
        self._threads = 0
        self.accepted: list[Accepted] = []
        self.samples: dict[tuple[str, str, float], list[TimedCompletion]] = {}
        self.plain: dict[float, list[str]] = {}
        self.repeated: list[int] = []
        self.pairs: list[Pair] = []
        self.mismatches: list[str] = []
        self.server = ""

    def run(self, token_map: Path) -> None:
        tree_drafters = (
            *("--drafter", HEAD),
            *("--drafter", arms.NGRAM),
            *("--drafter", f"name=eagle3-fr,algorithm=EAGLE3,model={DEMO / 'eagle3'},token_map={token_map}"),
            *("--drafter", f"name=eagle2,algorithm=EAGLE2,model={DEMO / 'eagle2'}"),
            *("--drafter", f"name=eagle2-fr,algorithm=EAGLE2,model={DEMO / 'eagle2'},token_map={token_map}"),
            *("--drafter", f"name=eagle3-uncoupled,algorithm=EAGLE3,model={DEMO / 'eagle3'},coupled_noise=false"),
        )
        with running_stack(DEMO / "target", self._threads, (*TREE, *tree_drafters)) as (address, _):
            bench = Bench(functools.partial(complete, address), describe(address)["model"], progress)
            self._take_plain(bench)
            for name in ("eagle3", "eagle3-fr", "eagle2", "eagle2-fr", "ngram", "eagle3+ngram"):
                self._accept(bench, name, "5, 4, 16", 0.0)
            for temperature in (0.7, 1.0):
                for name in ("eagle3", "eagle3-uncoupled"):
                    self._accept(bench, name, "5, 4, 16", temperature)
        standalone = ("--drafter", f"name=standalone,algorithm=STANDALONE,model={DEMO / 'standalone'}")
        with running_stack(DEMO / "target", self._threads, (*CHAIN, *standalone)) as (address, _):
            bench = Bench(functools.partial(complete, address), describe(address)["model"], progress)
            self._accept(bench, "standalone", "4, 1, 5", 0.0)
        with running_stack(DEMO / "target", self._threads, SERVED) as (address, _):
            self.server = describe(address)["model"]
            bench = Bench(functools.partial(complete, address), self.server, progress)
            bench.warm_up(self._code)
            self.pairs = bench.pairs(self._code, self._num_pairs)
            for number, pair in enumerate(self.pairs, start=1):
                self.mismatches += [f"auto, pair {number}, prompt {i}: not plain text" for i in pair.mismatches()]

    def _take_plain(self, bench: Bench) -> None:
        """Measure plain texts at each temperature, and find the prompts with repeated code."""
        for temperature in (0.0, 0.7, 1.0):
            samples = bench.plain(replace(self._code, temperature=temperature))
            self.plain[temperature] = [sample.text for sample in samples]
        outputs = bench.outputs(self._code, os.urandom(8).hex())
        self.repeated = [i for i, output in enumerate(outputs) if repeated_share([output]) >= REPEATED]

    def _accept(self, bench: Bench, name: str, shape: str, temperature: float) -> None:
        workload = replace(self._code, drafter=name, temperature=temperature)
        samples = bench.drafted(workload)
        for sample, text in zip(samples, self.plain[temperature], strict=True):
            if sample.text != text:
                self.mismatches.append(f"{name}, T {temperature:g}, prompt {sample.prompt_index}: not plain text")
        self.samples[name, shape, temperature] = samples
        entry = Accepted(
            name, shape, temperature, mean_tokens(samples), per_position(samples), median(list(map(step_ms, samples)))
        )
        self.accepted.append(entry)
        progress(f"{name} ({shape}) at T {temperature:g}: {entry.tokens_per_step:.2f} tokens a step")

    def tokens(self, name: str, *, temperature: float = 0.0, only: Sequence[int] | None = None) -> float:
        """Return a drafter's tokens a step, over all prompts or over ``only``."""
        (samples,) = [found for key, found in self.samples.items() if (key[0], key[2]) == (name, temperature)]
        return mean_tokens([sample for sample in samples if only is None or sample.prompt_index in only])


def mean_tokens(samples: Sequence[TimedCompletion]) -> float:
    """Return tokens of all decode steps / decode steps, without prefill: the mean over requests."""
    return sum(sample.tokens_per_step for sample in samples) / len(samples)


def per_position(samples: Sequence[TimedCompletion]) -> tuple[float, ...]:
    """Return accepted tokens at each depth over all drafters / steps that drafted."""
    counts: list[int] = []
    steps = sum(sample.speculation["num_spec_steps"] for sample in samples)
    for sample in samples:
        for drafter in sample.speculation["drafters"].values():
            positions = drafter["accepted_per_position"]
            counts.extend([0] * (len(positions) - len(counts)))
            for depth, count in enumerate(positions):
                counts[depth] += count
    return tuple(count / steps for count in counts) if steps else ()


def step_ms(sample: TimedCompletion) -> float:
    """Return the milliseconds of a decode step, measured at the client."""
    return sample.timing.ms_per_token * sample.tokens_per_step


def figures_of(measured: DrafterMeasurement) -> list[Figure]:
    """Return the figures that have bars."""
    step = "tokens of all decode steps / decode steps; mean over prompts"
    eagle3, eagle2 = measured.tokens("eagle3"), measured.tokens("eagle2")
    merged, best = measured.tokens("eagle3+ngram"), max(eagle3, measured.tokens("ngram"))
    only = measured.repeated
    ratios = [pair.ratio for pair in measured.pairs]
    coupled = measured.tokens("eagle3", temperature=1.0)
    figures = [
        Figure("EAGLE-3 (5, 4, 16)", eagle3, "tokens/step", step, Bar("at least", 3.0)),
        Figure("EAGLE-3 / EAGLE-2", eagle3 / eagle2, "x", f"{step}; one over the other", Bar("above", 1.0)),
        Figure("STANDALONE (4, 1, 5)", measured.tokens("standalone"), "tokens/step", step, Bar("at least", 2.3)),
        Figure("EAGLE-3 + n-gram / the better alone", merged / best, "x", step, Bar("at least", 0.98)),
        Figure("EAGLE-3 coupled, T 1.0 / greedy", coupled / eagle3, "x", step, Bar("at least", 0.9)),
        Figure(
            "auto / plain",
            median(ratios),
            "x",
            "tok/s of speculative runs / tok/s of plain runs; median of the pairs (least to most)",
            Bar("at least", 1.6),
            tuple(ratios),
        ),
    ]
    if only:
        alone = max(measured.tokens(name, only=only) for name in ("eagle3", "ngram"))
        ratio = measured.tokens("eagle3+ngram", only=only) / alone
        name = f"the same on the {len(only)} prompts of repeated code"
        figures.insert(4, Figure(name, ratio, "x", step, Bar("above", 1.0)))
    return figures


def to_markdown(result: Result) -> str:
    lines = [f"- {name}: {text}" for name, text in result.facts.items()]
    lines += ["", "| drafter | steps, top-k, tokens | T | tokens a step | ms a step | accepted per depth |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- |")
    for entry in result.accepted:
        depths = " ".join(f"{share:.2f}" for share in entry.per_position)
        lines.append(
            f"| {entry.name} | {entry.shape} | {entry.temperature:g} | {entry.tokens_per_step:.2f} | "
            f"{entry.ms_per_step:.2f} | {depths} |"
        )
    return "\n".join(lines) + "\n\n" + figures_table(result.figures, judged=result.judged) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.drafters", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run to see that all works; no bar is judged")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    began = time.monotonic()
    used = take_cores(NUM_CORES)
    measured = DrafterMeasurement(6, 32, 1) if options.quick else DrafterMeasurement(NUM_PROMPTS, NUM_TOKENS, NUM_PAIRS)
    try:
        with tempfile.TemporaryDirectory() as folder:
            token_map = Path(folder) / "token_map.safetensors"
            write_token_map(token_map, DEMO / "target", TOKEN_MAP_SIZE)
            measured.run(token_map)
    except (StackError, StreamError, UnexpectedAnswerError, TooShortError) as error:
        sys.exit(f"failed: {error}")
    facts = environment.facts("benchmarks.drafters", used, began) | {
        "repeated code": f"{len(measured.repeated)} prompts whose output lies to {REPEATED:.0%} in {NGRAM}-grams that "
        "occur twice or more in it",
    }
    result = Result(
        facts, measured.accepted, measured.pairs, figures_of(measured), measured.mismatches, not options.quick
    )
    if options.output is not None:
        options.output.write_text(json.dumps(asdict(result) | {"failures": result.failures()}, indent=1) + "\n")
    print(to_markdown(result))
    finish(result.failures(), judged=result.judged)


if __name__ == "__main__":
    main()
