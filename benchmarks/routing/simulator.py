"""Replay a trace over modelled verifiers, with the gateway's own routing.

    python -m benchmarks.routing.simulator [--verifiers 8] [--rate 150] [--seconds 120] [--gateways 1]
        [--trace FILE [--block-tokens 512]] [--write-trace FILE] [--by-load] [--load-bound 1.25]
        [--die 0.1 [--noticed 5]] [--step-ms 4.25] [--row-us 18.6] [--token-us 23] [--cache-tokens 400000]
        [--check]

It prints the prefix hit rate beside that of one verifier with an unlimited cache, the imbalance
(load of the busiest verifier over the mean), waiting and first-token times, and, with ``--die``,
what the death of that share of the verifiers costs in the middle of the trace. With ``--check`` the
exit status is 1 if a bar is missed: a hit rate within 10% of the unlimited cache's, an imbalance
below 1.25. ``benchmarks/routing/trace.py`` describes the files.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.routing import trace
from benchmarks.routing.modelled_fleet import Death, ModelledFleet, Run, made_up_addresses
from benchmarks.routing.modelled_verifier import Costs, ModelledRequest
from benchmarks.routing.trace import Mix, Request
from gateway.routing.defaults import DEFAULT_LOAD_BOUND

LEAST_OF_INFINITE = 0.9
MAX_IMBALANCE = 1.25


@dataclass(frozen=True)
class SimulationReport:
    """Figures of one run, with times in seconds.

    ``load`` is a mean over time and verifiers, of sequences that run or wait. ``imbalance`` is the
    most of a verifier over the mean.
    """

    num_requests: int
    hit_rate: float
    infinite_hit_rate: float
    imbalance: float
    request_imbalance: float
    load: float
    output_tokens_per_s: float
    queued_p50_s: float
    queued_p99_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    reasons: dict[str, int]

    @property
    def meets_bars(self) -> bool:
        return self.hit_rate >= LEAST_OF_INFINITE * self.infinite_hit_rate and self.imbalance < MAX_IMBALANCE

    def lines(self) -> list[str]:
        share = self.hit_rate / self.infinite_hit_rate if self.infinite_hit_rate else 1.0
        total = sum(self.reasons.values())
        return [
            f"requests          {self.num_requests}",
            f"hit rate          {self.hit_rate:.3f}, {share:.1%} of an unlimited cache's {self.infinite_hit_rate:.3f}",
            f"imbalance         {self.imbalance:.3f} by load, {self.request_imbalance:.3f} by requests",
            f"load              {self.load:.1f} sequences a verifier",
            f"output            {self.output_tokens_per_s:.0f} tokens/s",
            f"waiting           p50 {1e3 * self.queued_p50_s:.1f} ms, p99 {1e3 * self.queued_p99_s:.1f} ms",
            f"first token       p50 {1e3 * self.first_token_p50_s:.1f} ms, p99 {1e3 * self.first_token_p99_s:.1f} ms",
            "decided by        " + ", ".join(f"{name} {n / total:.1%}" for name, n in sorted(self.reasons.items())),
        ]


def report(fleet: ModelledFleet, run: Run, requests: Items[Request], block_tokens: int) -> SimulationReport:
    """Return the figures of a run that has ended."""
    counts = [verifier.counts for verifier in fleet.verifiers]
    load = np.array([count.sequence_s for count in counts])
    num_requests = np.array([count.num_requests for count in counts])
    queued = [sequence.queued_s for sequence in run.finished]
    first = [sequence.first_token_s for sequence in run.finished]
    return SimulationReport(
        num_requests=len(run.finished),
        hit_rate=sum(count.hit_tokens for count in counts) / sum(count.prompt_tokens for count in counts),
        infinite_hit_rate=trace.infinite_hit_rate(requests, block_tokens),
        imbalance=float(load.max() / load.mean()),
        request_imbalance=float(num_requests.max() / num_requests.mean()),
        load=float(load.mean() / (run.ends_s - requests[0].at_s)),
        output_tokens_per_s=sum(count.output_tokens for count in counts) / (run.ends_s - requests[0].at_s),
        queued_p50_s=float(np.percentile(queued, 50)),
        queued_p99_s=float(np.percentile(queued, 99)),
        first_token_p50_s=float(np.percentile(first, 50)),
        first_token_p99_s=float(np.percentile(first, 99)),
        reasons=dict(run.reasons),
    )


def death_lines(finished: Items[ModelledRequest], death: Death) -> list[str]:
    """Return what a death cost: the streams that paused, and first tokens before and after it."""
    pauses = [sequence.pause_s for sequence in finished if not math.isnan(sequence.pause_s)]
    lines = [f"death of {len(death.numbers)} verifiers at {death.at_s:.0f} s, noticed after {death.noticed_s:g} s"]
    if pauses:
        p50, p99 = np.percentile(pauses, (50, 99))
        lines.append(f"paused streams    {len(pauses)}: p50 {p50:.2f} s, p99 {p99:.2f} s until the next token")
    spans = (("before", -30.0, 0.0), ("0 to 10 s after", 0.0, 10.0), ("10 to 30 s after", 10.0, 30.0))
    for name, begins, ends in spans:
        first = [s.first_token_s for s in finished if begins <= s.request.at_s - death.at_s < ends]
        if first:
            p50, p99 = np.percentile(first, (50, 99))
            lines.append(f"first token       {name}: p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms")
    return lines


def main(argv: Items[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.trace is not None:
        requests, block_tokens = trace.read(options.trace), options.block_tokens or 512
    else:
        block_tokens = options.block_tokens or trace.MADE_BLOCK_TOKENS
        mix = Mix(options.rate, options.seconds, shared=options.shared, seed=options.seed, block_tokens=block_tokens)
        requests = trace.make(mix)
    if options.write_trace is not None:
        trace.write(options.write_trace, requests)
    costs = Costs(
        step_s=options.step_ms / 1e3,
        row_s=options.row_us / 1e6,
        token_s=options.token_us / 1e6,
        rows=options.rows,
        cache_tokens=options.cache_tokens,
    )
    fleet = ModelledFleet(
        costs,
        made_up_addresses(options.verifiers),
        block_tokens,
        num_gateways=options.gateways,
        load_bound=options.load_bound,
        by_load=options.by_load,
    )
    death = None
    if options.die:
        # Whichever: to hashes all numbers are alike.
        numbers = frozenset(range(max(round(options.die * options.verifiers), 1)))
        death = Death(requests[len(requests) // 2].at_s, numbers, options.noticed)
    began = time.perf_counter()
    run = fleet.replay(requests, death)
    result = report(fleet, run, requests, block_tokens)
    print("\n".join(result.lines()))
    if death is not None:
        print("\n".join(death_lines(run.finished, death)))
    print(f"simulated in      {time.perf_counter() - began:.1f} s")
    return 0 if result.meets_bars or not options.check else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Replay a trace over modelled verifiers.")
    costs = Costs()
    parser.add_argument("--verifiers", type=int, default=8)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--rate", type=float, default=150.0, help="requests a second of a made-up trace")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of a made-up trace")
    parser.add_argument("--shared", type=float, default=0.5, help="share of conversations with a system prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="replay this file")
    parser.add_argument("--block-tokens", type=int, default=0, help="tokens of a block: 64, or 512 for --trace")
    parser.add_argument("--write-trace", type=Path, help="write the trace to this file")
    parser.add_argument("--by-load", action="store_true", help="leave prefixes out of account")
    parser.add_argument("--load-bound", type=float, default=DEFAULT_LOAD_BOUND)
    parser.add_argument("--die", type=float, default=0.0, help="share of the verifiers that dies halfway")
    parser.add_argument("--noticed", type=float, default=5.0, help="seconds until a death is noticed")
    parser.add_argument("--step-ms", type=float, default=1e3 * costs.step_s)
    parser.add_argument("--row-us", type=float, default=1e6 * costs.row_s)
    parser.add_argument("--token-us", type=float, default=1e6 * costs.token_s)
    parser.add_argument("--rows", type=int, default=costs.rows)
    parser.add_argument("--cache-tokens", type=int, default=costs.cache_tokens)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
