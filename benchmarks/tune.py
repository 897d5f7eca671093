"""Compare ``foretoken tune`` with the full grid.

The model is the demo model, or another one with an EAGLE-3 head.

    python -m benchmarks.tune [--batches 1,4,16] [--shapes 1-1-2,3-1-4] [--output FILE] [--quick]
    python -m benchmarks.tune --target WIDE/target --head WIDE/eagle3 --cores 0    # on a GPU
    python -m benchmarks.tune --by-flags 3-1-4

Held-out code runs against one server: first tuning, then the full grid, then what tuning found and
what the grid found in turn; a ratio is the median of these pairs. The exit status is 1 if tuning
misses 3% of the grid's best, or takes more than a quarter of its time. ``--by-flags`` instead holds
a shape that requests ask for against the same shape by flags, on two servers in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import environment
from benchmarks.arms import EAGLE3, NGRAM
from benchmarks.command import finish, numbers, progress, take_cores
from benchmarks.figures import median
from benchmarks.prompts import code_prompts
from benchmarks.report import Bar, Figure, figures_table, missed_bars
from benchmarks.stack import terminable
from foretoken.bench.client import Address
from foretoken.bench.load import Clients, running_clients
from foretoken.bench.run import prompts_of
from foretoken.bench.target import BenchTarget, RequestOptions, served_model
from foretoken.errors import ForetokenError
from foretoken.tune import report
from foretoken.tune.candidates import Candidate, ShapeFlags, TunedDrafter, bounds_of, candidates, parse_shape
from foretoken.tune.choice import best_of
from foretoken.tune.measure import Meter
from foretoken.tune.server import running_server
from foretoken.tune.settings import TuneSettings
from foretoken.tune.tuner import Findings, Tuner

DEMO = environment.ROOT / "models" / "demo"
DRAFTERS = (TunedDrafter("eagle3", has_model=True), TunedDrafter("ngram", has_model=False))
NUM_CORES = 2
NUM_PROMPTS = 128
OUTPUT_LEN = 64
NUM_PAIRS = 9
OF_BEST, OF_TIME, OF_FLAGS = 0.97, 0.25, 0.97


@dataclass(frozen=True, slots=True)
class Served:
    """A target, its EAGLE-3 head as a drafter's flag, and the requests that run at once."""

    target: Path
    head: str
    max_running: int

    @staticmethod
    def of(target: Path | None, head: Path | None, max_running: int) -> Served:
        """Return the given models.

        None means the demo's, whose head drafts its most frequent tokens alone.
        """
        token_map = "" if head else f",token_map={DEMO / 'token_map.safetensors'}"
        flag = EAGLE3.format(head=head or DEMO / "eagle3") + token_map
        return Served(target or DEMO / "target", flag, max_running)

    def flags(self) -> list[str]:
        """Return the flags of a server with the head."""
        most = str(self.max_running)
        return [str(self.target), "--disable-radix-cache", "--max-running-requests", most, "--drafter", self.head]

    def flags_for(self, shapes: Sequence[ShapeFlags]) -> list[str]:
        """Return the flags of a server with both drafters that admits all shapes."""
        _, topk, nodes = bounds_of(shapes, ShapeFlags(1, 4, 8))
        bounds = ["--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(nodes)]
        return [*self.flags(), "--drafter", NGRAM, *bounds]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What tuning found, what it is held against, and the tokens a second of both in turn."""

    batch: int
    found: str
    other: str
    found_rates: list[float]
    other_rates: list[float]

    def ratios(self) -> list[float]:
        """Return found / other of each pair."""
        return [one / other for one, other in zip(self.found_rates, self.other_rates, strict=True)]


class Servers:
    """Measures candidates with one set of clients and prompts."""

    def __init__(self, settings: TuneSettings, clients: Clients) -> None:
        self._settings, self._clients = settings, clients

    def tune(self, address: Address, tried: Sequence[Candidate], budget: float) -> Findings:
        """Return the findings of a tuning; ``budget`` 1: of the full grid."""
        settings = self._settings.model_copy(update={"budget": budget})
        target = self._target(address)
        return Tuner(settings, tried, target, prompts_of(settings, target), self._clients, progress).run()

    def alternate(
        self, batch: int, first: tuple[Address, Candidate], second: tuple[Address, Candidate], count: int
    ) -> tuple[list[float], list[float]]:
        """Return the tokens a second of ``count`` rounds of both; which one comes first changes."""
        meters = [self._meter(address, batch) for address, _ in (first, second)]
        rates: tuple[list[float], list[float]] = [], []
        turns = [(meters[0], first[1], rates[0]), (meters[1], second[1], rates[1])]
        for meter, candidate, _ in turns:
            meter.warm_up(candidate)
        for number in range(count):
            for meter, candidate, found in turns if number % 2 == 0 else reversed(turns):
                found.append(meter.rate(candidate, 1_000_000 + number))
        return rates

    def _meter(self, address: Address, batch: int) -> Meter:
        settings, target = self._settings, self._target(address)
        size, timeout_s = settings.round_size(batch), settings.read_timeout_s
        prompts = prompts_of(settings, target)
        return Meter(
            target, prompts, self._clients, batch, size, timeout_s, settings.seed, lambda candidate, rate: None
        )

    def _target(self, address: Address) -> BenchTarget:
        options = RequestOptions(self._settings.endpoint, self._settings.output_len, self._settings.temperature)
        return BenchTarget("server", address, served_model(address), options)


def hold(
    settings: TuneSettings, servers: Servers, served: Served, num_pairs: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Tune, measure the grid, and compare. Return the figures and everything that was measured."""
    tried = candidates(DRAFTERS, settings.try_drafters, settings.draft_shapes)
    with running_server(served.flags_for(settings.draft_shapes)) as address:
        tuned = servers.tune(address, tried, settings.budget)
        grid = servers.tune(address, tried, 1.0)
        pairs = []
        for batch in settings.batches:
            found, best = (best_of(report.medians(findings)[batch]) for findings in (tuned, grid))
            rates = servers.alternate(batch, (address, found), (address, best), num_pairs if found != best else 1)
            pairs.append(Pairs(batch, found.name, best.name, *rates))
            progress(f"{batch} at once: tuning found {found.name}, the grid {best.name}")
    figures = [_figure(pair, f"tuning's {pair.found} / the grid's {pair.other}", OF_BEST) for pair in pairs]
    share = tuned.seconds / grid.seconds
    figures.append(Figure("time of tuning / of the grid", share, "x", "seconds over seconds", Bar("below", OF_TIME)))
    content = {
        name: {"seconds": each.seconds, "num_rounds": each.num_rounds, "tokens_per_s": _named(each)}
        for name, each in (("tuned", tuned), ("grid", grid))
    }
    return figures, content | {"pairs": [asdict(pair) for pair in pairs]}


def hold_by_flags(
    settings: TuneSettings, servers: Servers, served: Served, shape: ShapeFlags, num_pairs: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Compare requests that ask for a shape with a server whose flags fix it.

    The shape is within the usual bounds.
    """
    asked = Candidate(f"eagle3 {shape.name}", ("eagle3",), shape)
    fixed = Candidate(f"eagle3 {shape.name} by flags", ("eagle3",))
    with (
        running_server(served.flags_for(settings.draft_shapes)) as by_field,
        running_server([*served.flags(), *_flags(shape)]) as by_flags,
    ):
        pairs = [
            Pairs(
                batch,
                asked.name,
                fixed.name,
                *servers.alternate(batch, (by_field, asked), (by_flags, fixed), num_pairs),
            )
            for batch in settings.batches
        ]
    figures = [_figure(pair, f"{pair.found} by request / by flags", OF_FLAGS) for pair in pairs]
    return figures, {"pairs": [asdict(pair) for pair in pairs]}


def _figure(pair: Pairs, name: str, limit: float) -> Figure:
    ratios = pair.ratios() if pair.found != pair.other else [1.0]
    formula = "tok/s over tok/s; median of the pairs (least to most)"
    return Figure(f"{name}, {pair.batch} at once", median(ratios), "x", formula, Bar("at least", limit), tuple(ratios))


def _named(findings: Findings) -> dict[str, dict[str, list[float]]]:
    return {
        str(batch): {candidate.name: rounds for candidate, rounds in measured.items()}
        for batch, measured in findings.rates.items()
    }


def _flags(shape: ShapeFlags) -> list[str]:
    names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    return [word for name, value in zip(names, shape, strict=True) for word in (name, str(value))]


def write_prompts(path: Path, target: Path) -> None:
    """Write held-out code as prompts, one a line."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = [tokenizer.decode(list(prompt.token_ids)) for prompt in code_prompts(tokenizer, NUM_PROMPTS)]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="a target's folder; default: the demo's")
    parser.add_argument("--head", type=Path, help="the folder of its EAGLE-3 head")
    parser.add_argument("--cores", type=int, default=NUM_CORES, help="cores for servers and clients; 0: all")
    parser.add_argument("--batches", default="1,4,16", help="requests at once, by commas")
    parser.add_argument("--shapes", default="", help="shapes to try; default: those of foretoken tune")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of each candidate in the grid")
    parser.add_argument("--budget", type=float, default=0.2, help="share of the grid's rounds for tuning")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="pairs that decide")
    parser.add_argument("--by-flags", type=parse_shape, metavar="S-K-N", help="hold this shape by request and by flags")
    parser.add_argument("--quick", action="store_true", help="a run to see that all works; no bar is judged")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    if (options.target is None) != (options.head is None):
        parser.error("--target and --head go together")
    began = time.monotonic()
    used = take_cores(options.cores or os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, running_clients(1) as clients, terminable():
        prompts = Path(folder) / "prompts.jsonl"
        served = Served.of(options.target, options.head, max(numbers(options.batches)))
        write_prompts(prompts, served.target)
        values: dict[str, Any] = {
            "max_concurrency": options.batches,
            "num_rounds": options.rounds,
            "output_len": OUTPUT_LEN,
        }
        values["budget"] = options.budget
        if options.shapes:
            values["shapes"] = options.shapes
        settings = TuneSettings.model_validate(values | {"dataset_name": "file", "dataset_path": prompts})
        servers = Servers(settings, clients)
        try:
            if options.by_flags is not None:
                figures, content = hold_by_flags(settings, servers, served, options.by_flags, options.pairs)
            else:
                figures, content = hold(settings, servers, served, options.pairs)
        except ForetokenError as error:
            sys.exit(f"failed: {error}")
    facts = environment.facts("benchmarks.tune", f"{used}, {os.getloadavg()[0]:.1f} after", began)
    if options.output is not None:
        result = facts | content | {"figures": [asdict(figure) for figure in figures]}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"- {name}: {text}" for name, text in facts.items()))
    print(f"\n{figures_table(figures, judged=not options.quick)}")
    finish([] if options.quick else missed_bars(figures), judged=not options.quick)


if __name__ == "__main__":
    main()
