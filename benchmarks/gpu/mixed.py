"""Measure decode steps of batches with different requests, through the real services.

    python -m benchmarks.gpu.mixed --model DIR/target --drafter-head DIR/eagle3 --output FILE

It measures as benchmarks.gpu.steps does, with verifier and drafter as two processes and a forced
acceptance. One batch has a tree beside requests without drafts. The others have chains beside one
request with a grammar, with n-grams or with logprobs. Beside a grammar or n-grams steps cannot
overlap, because the host must see a result between two steps. Each batch is compared with one
without the odd request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arms import NGRAM
from benchmarks.command import progress
from benchmarks.figures import median
from benchmarks.gpu import bars
from benchmarks.gpu.bars import SETTINGS, DecodingFlags
from benchmarks.gpu.provenance import keep, run_facts
from benchmarks.gpu.step_times import Arrivals
from benchmarks.gpu.steps import StepsWorkload, enough_steps, serve_flags, served
from benchmarks.gpu.verifier_client import SessionClient, new_sequence
from benchmarks.stack import StackError
from protos import verifier_pb2

TREE = next(setting for setting in SETTINGS if setting.name == "tree 5-8-32")
CHAIN = next(setting for setting in SETTINGS if setting.name == "chain 5-1-6")
BATCH = 16
# As many rows as a tree of 32 beside 15 roots, and one more.
PLAIN_ROWS = 48
NGRAM_FLAGS = ("--drafter", NGRAM)
# It never forces an end, and admits few tokens of most vocabularies.
REGEX = "[a-z ]*"
NUM_LOGPROBS = 5
# An n-gram drafter finds drafts in a text that repeats itself.
REPEATED_TOKEN = 100
REPEATED_BIAS = 100.0

# Sets the options of a request.
Wants = Callable[[verifier_pb2.Sequence], None]


def plain(sequence: verifier_pb2.Sequence) -> None:
    sequence.speculation.enabled = False


def drafts(sequence: verifier_pb2.Sequence) -> None:
    sequence.speculation.drafter = "eagle3"


def grammar(sequence: verifier_pb2.Sequence) -> None:
    drafts(sequence)
    sequence.sampling.regex = REGEX


def logprobs(sequence: verifier_pb2.Sequence) -> None:
    drafts(sequence)
    sequence.sampling.logprobs = NUM_LOGPROBS


def ngram(sequence: verifier_pb2.Sequence) -> None:
    sequence.speculation.drafter = "ngram"
    sequence.sampling.logit_bias[REPEATED_TOKEN] = REPEATED_BIAS


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of ``size`` requests with the same options; ``odd`` sets the last one's instead.

    ``against`` names the case to compare with.
    """

    name: str
    size: int
    wants: Wants
    odd: Wants | None = None
    against: str = ""

    def sequences(
        self, workload: StepsWorkload, seed: str, accept_length: float, steps: int
    ) -> list[verifier_pb2.Sequence]:
        """Return requests of ``steps`` steps if drafted steps give ``accept_length`` tokens."""
        found = []
        for index, prompt in enumerate(workload.prompts(self.size, seed)):
            sequence = new_sequence(index, prompt, 1)
            is_odd = self.odd is not None and index == self.size - 1
            (self.odd if is_odd and self.odd is not None else self.wants)(sequence)
            sequence.sampling.max_tokens = math.ceil(steps * tokens_a_step(sequence, accept_length))
            found.append(sequence)
        return found


def tokens_a_step(sequence: verifier_pb2.Sequence, accept_length: float) -> float:
    return accept_length if sequence.speculation.drafter else 1.0


def ragged_cases(batch: int, plain_rows: int) -> list[Case]:
    """Return the cases for a server with the trees of TREE."""
    base = f"{batch} plain"
    return [
        Case(base, batch, plain),
        Case(f"{plain_rows} plain", plain_rows, plain),
        Case("1 tree", 1, drafts),
        Case(f"1 tree beside {batch - 1} plain", batch, plain, drafts, base),
    ]


def host_cases(batch: int) -> list[Case]:
    """Return the cases for a server with the trees of CHAIN and an n-gram drafter."""
    base = f"{batch} chains"
    odd = (("a grammar", grammar), ("n-grams", ngram), ("logprobs", logprobs))
    return [
        Case(base, batch, drafts),
        *(Case(f"{base}, 1 with {what}", batch, drafts, each, base) for what, each in odd),
    ]


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each case. Each server starts once. Raises StackError."""
    model, head = options.model.resolve(), options.drafter_head.resolve()
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    # Each case sets how many tokens its requests decode.
    workload = StepsWorkload(vocab_size, options.prompt_tokens, 1, options.min_steps, 0.0)
    extra = ["--numerics", options.numerics, *shlex.split(options.serve_flags)]
    groups = (
        (TREE, ragged_cases(options.batch, options.plain_rows), ()),
        (CHAIN, host_cases(options.batch), NGRAM_FLAGS),
    )
    for setting, cases, drafters in groups:
        most = max(case.size for case in cases)
        flags = [*serve_flags(setting, head, in_process=False, batch=most), *drafters, *extra]
        num_drafters = flags.count("--drafter")
        with (
            served(setting.name, model, options.threads, flags, num_drafters=num_drafters) as server,
            SessionClient(server.verifier) as client,
        ):
            for case in cases:
                yield _row(client, setting, case, workload, options.steps)


def _row(
    client: SessionClient, setting: DecodingFlags, case: Case, workload: StepsWorkload, steps: int
) -> dict[str, Any]:
    """Warm up, decode batches until the first sequence has enough steps, and return the figures."""
    of_odd: list[Arrivals] = []

    def decode(seed: str) -> list[Arrivals]:
        arrivals = client.decode(case.sequences(workload, seed, setting.accept_length, steps))
        of_odd.append(arrivals[-1])
        return list(arrivals)

    decode(f"warm-up {case.name}")
    of_odd.clear()
    before = client.info()
    sequences = case.sequences(workload, "", setting.accept_length, steps)
    accept_length, of_last = (tokens_a_step(sequences[at], setting.accept_length) for at in (0, -1))
    times, num_rounds = enough_steps(case.name, decode, accept_length, workload.min_steps)
    after = client.info()
    num_drafts = {drafter.name: drafter.num_drafts for drafter in before.drafters}
    row = {
        "case": case.name,
        "against": case.against,
        "size": case.size,
        "tree": f"{setting.steps}-{setting.topk}-{setting.tokens}",
        "simulate_accept_length": setting.accept_length,
        "mode": after.mode.split(",")[0],
        "dtype": after.dtype,
        "drafters": {drafter.name: drafter.transport for drafter in after.drafters},
        "median_ms": 1e3 * median(times.seconds),
        "num_dropped": times.num_dropped,
        "last_tokens_per_step": mean_tokens(of_odd, math.ceil(of_last)),
        "num_steps": after.num_steps - before.num_steps,
        "num_resident_steps": after.num_resident_steps - before.num_resident_steps,
        "num_fallback_steps": after.num_fallback_steps - before.num_fallback_steps,
        "num_drafts": {drafter.name: drafter.num_drafts - num_drafts[drafter.name] for drafter in after.drafters},
        "num_rounds": num_rounds,
        "step_ms": [round(1e3 * seconds, 5) for seconds in times.seconds],
    }
    progress(
        f"{case.name}: {row['median_ms']:.3f} ms a step, "
        f"{row['num_resident_steps']} of {row['num_steps']} overlapped; "
        f"{times.num_dropped} intervals dropped, {row['num_fallback_steps']} steps without a draft"
    )
    return row


def mean_tokens(sequences: Sequence[Arrivals], most: int) -> float:
    """Return the mean tokens of a sequence's steps; 0 without steps.

    More than ``most`` tokens at once came from several steps and do not count.
    """
    counts = [has - had for each in sequences for (_, had), (_, has) in itertools.pairwise(each) if has - had <= most]
    return sum(counts) / max(len(counts), 1)


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of all rows, each beside the row that it is compared with."""
    medians = {row["case"]: row["median_ms"] for row in rows}
    lines = ["| | ms a step | without the odd one | costs | overlapped steps | tokens a step of the last |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        base = medians.get(row["against"])
        costs = " | " if base is None else f"{base:.3f} | {row['median_ms'] - base:+.3f}"
        lines.append(
            f"| {row['case']} | {row['median_ms']:.3f} | {costs} | "
            f"{row['num_resident_steps']} of {row['num_steps']} | {row['last_tokens_per_step']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def judge(rows: Sequence[dict[str, Any]], batch: int, plain_rows: int, draft_ms: float) -> tuple[bool, str]:
    """Return whether the ragged step reaches its bar, and a line about it.

    ``draft_ms`` is the time of one tree's draft alone.
    """
    medians = {row["case"]: row["median_ms"] for row in rows}
    _, many, _, ragged = (medians[case.name] for case in ragged_cases(batch, plain_rows))
    factor, slack = bars.RAGGED_VERIFY, bars.RAGGED_SLACK_MS
    bar = factor * many + draft_ms + slack
    verdict = "pass" if ragged <= bar else "FAIL"
    return ragged <= bar, (
        f"{verdict}: 1 tree beside {batch - 1} plain: {ragged:.3f} ms, must be at most {bar:.3f}: "
        f"{factor:g} x {many:.3f} of {plain_rows} plain + {draft_ms:g} of a draft + {slack:g}"
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="benchmarks.gpu.mixed", description=__doc__.splitlines()[0])
    found.add_argument("--model", type=Path, required=True, help="the target's folder")
    found.add_argument("--drafter-head", type=Path, required=True, help="the EAGLE-3 head's folder")
    found.add_argument("--output", type=Path, required=True, help="a JSON file to write")
    found.add_argument(
        "--draft-ms", type=float, help="of draft (5, 8, 32, 4) by passes, batch 1: judges the ragged step"
    )
    found.add_argument("--threads", type=int, default=0, help="as foretoken serve's; counts on a CPU")
    found.add_argument("--numerics", choices=("auto", "strict", "fast"), default="auto", help="as foretoken serve's")
    found.add_argument("--serve-flags", default="", help="more flags of foretoken serve, as one word")
    found.add_argument("--commit", default="", help="the commit, in a copy without its history")
    found.add_argument("--prompt-tokens", type=int, default=bars.PROMPT_TOKENS)
    found.add_argument("--steps", type=int, default=64, help="of each batch")
    found.add_argument("--min-steps", type=int, default=bars.MIN_STEPS, help="step times of a row at least")
    found.add_argument("--batch", type=int, default=BATCH)
    found.add_argument("--plain-rows", type=int, default=PLAIN_ROWS, help="of the plain batch beside the ragged one")
    return found


def main() -> None:
    options = parser().parse_args()
    try:
        rows = keep(measure(options), run_facts("mixed", options.commit), options.output)
    except StackError as error:
        sys.exit(f"failed: {error}")
    print(to_markdown(rows))
    if options.draft_ms is not None:
        is_reached, line = judge(rows, options.batch, options.plain_rows, options.draft_ms)
        print(line)
        sys.exit(0 if is_reached else 1)


if __name__ == "__main__":
    main()
