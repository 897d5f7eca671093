"""Simulate a served load on a machine with given costs: what a limit of the step costs and gains.

    python -m benchmarks.prefill_budget [--streams 16 64 256] [--limits 0 60 40 30] [--token-us 20]

The budget is the server's own (verifier_svc/scheduling/prefill_budget.py). Steps cost what they do
on an H200 with a model of the 8B shape and its EAGLE-3 head (docs/gpu-steps.md); ``--token-us`` is
what a prompt token really takes, where 18 were measured at start. Steps are noisy, and one in 200
takes twice as long. Each stream sends its next request as soon as the last one has ended; prompts
have 200 to 400 tokens, 192 tokens are written. Columns: output tokens a second; ms between two
chunks of a stream, p50, p99 and longest; ms to the first token, p50 and p99; the mean batch; prompt
tokens of a step that had some.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from verifier_svc.scheduling.prefill_budget import PrefillBudget

OUTPUT, PROMPTS = 192, (200, 400)
MOST_TOKENS = 2048
# Seconds of a pass that only reads the weights, and around any pass; of a row at start.
WEIGHTS_S, AROUND_S, ROW_S = 3.55e-3, 0.3e-3, 18e-6
# By batch: seconds of a step with drafts, and the tokens that it yields for each sequence.
BATCHES = (1, 4, 16, 64, 128, 256)
STEP_S = (5.8e-3, 6.2e-3, 7.0e-3, 12e-3, 17e-3, 27e-3)
TOKENS = (4.8, 5.0, 5.3, 5.2, 3.6, 3.6)
NOISE, DISTURBED, DISTURBANCE = 0.05, 0.005, 2.0


def pass_s(num_rows: int) -> float:
    """Return the seconds of a pass as measured at start."""
    return max(WEIGHTS_S, ROW_S * num_rows) + AROUND_S


@dataclass(eq=False)
class SimulatedStream:
    """One request after the other. Times are seconds."""

    requests: int
    sent_at: float = 0.0
    prompt_left: int = 0
    owed: float = 0.0
    last_at: float = math.nan


@dataclass
class SimulatedGaps:
    """What the streams have seen."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0


def simulate(num_streams: int, limit_s: float, token_s: float, num_requests: int) -> SimulatedGaps:
    """Return what ``num_streams`` streams see in ``num_requests`` requests each."""
    draw = random.Random(1)
    budget = PrefillBudget(
        MOST_TOKENS, limit_s=limit_s, token_s=pass_s(MOST_TOKENS) / MOST_TOKENS, smallest_s=pass_s(1)
    )
    load, now = SimulatedGaps(), 0.0
    prefilling: deque[SimulatedStream] = deque(
        SimulatedStream(num_requests, 0.0, draw.randint(*PROMPTS)) for _ in range(num_streams)
    )
    decoding: list[SimulatedStream] = []
    while prefilling or decoding:
        step_s = float(np.interp(len(decoding), BATCHES, STEP_S)) if decoding else 0.0
        room = budget.tokens(step_s) if prefilling else 0
        chunk = 0
        while prefilling and chunk < room:
            part = min(prefilling[0].prompt_left, room - chunk)
            prefilling[0].prompt_left -= part
            chunk += part
            if not prefilling[0].prompt_left:
                decoding.append(prefilling.popleft())
        # A sequence joins the step that follows its prompt.
        alone_s = float(np.interp(len(decoding), BATCHES, STEP_S)) if decoding else 0.0
        prompt_s = max(WEIGHTS_S, token_s * chunk) + AROUND_S if chunk else 0.0
        disturbed = DISTURBANCE if draw.random() < DISTURBED else 1.0
        seconds = (alone_s + prompt_s) * draw.lognormvariate(0.0, NOISE) * disturbed
        now += seconds
        if chunk:
            load.chunks.append(chunk)
            budget.observe(chunk, seconds, alone_s)
        load.batches.append(len(decoding))
        yields = float(np.interp(len(decoding), BATCHES, TOKENS))
        for stream in list(decoding):
            if stream.owed == 0.0:
                load.first.append(now - stream.sent_at)
                stream.owed = OUTPUT - 1.0
                stream.last_at = now
                continue
            load.gaps.append(now - stream.last_at)
            stream.last_at = now
            stream.owed -= yields
            if stream.owed > 0:
                continue
            load.num_tokens += OUTPUT
            decoding.remove(stream)
            stream.requests -= 1
            if stream.requests:
                stream.sent_at, stream.owed, stream.prompt_left = now, 0.0, draw.randint(*PROMPTS)
                prefilling.append(stream)
    load.seconds = now
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--limits", type=float, nargs="+", default=[0, 60, 40, 30], help="ms; 0: no limit")
    parser.add_argument("--token-us", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=5, help="of each stream")
    args = parser.parse_args()
    print("streams limit  tok/s   gap p50  p99  longest   first p50  p99   batch  prompt tokens")
    for num_streams in args.streams:
        for limit in args.limits:
            limit_s = limit / 1e3 if limit else math.inf
            load = simulate(num_streams, limit_s, args.token_us / 1e6, args.requests)
            gaps, first = np.array(load.gaps) * 1e3, np.array(load.first) * 1e3
            print(
                f"{num_streams:7} {limit:5g} {load.num_tokens / load.seconds:6.0f}"
                f"   {np.median(gaps):7.0f} {np.percentile(gaps, 99):4.0f} {gaps.max():8.0f}"
                f"   {np.median(first):9.0f} {np.percentile(first, 99):4.0f}"
                f"   {np.mean(load.batches):5.0f}  {np.mean(load.chunks):13.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
