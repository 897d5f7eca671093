"""Measure how long the gateway takes to choose a verifier.

    python -m benchmarks.routing.decisions [--tokens 2000] [--check]

Half of the prompts begin with one of four system prompts of half their length, the others with
nothing that was seen before. Times are medians of a decision, the hashing of the prompt apart. With
``--check`` the exit status is 1 if a decision over 1,000 verifiers takes 50 us or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from gateway.routing.fleet import Fleet
from gateway.routing.prefix import prefix_keys
from gateway.routing.router import Router

SIZES = (8, 64, 256, 1000)
NUM_PROMPTS = 4000
NUM_SYSTEMS = 4
MAX_US = 50.0


def loaded_fleet(size: int) -> Fleet:
    """Return a fleet in which each verifier has about 18 of 64 rows in use."""
    random = np.random.default_rng(size)
    fleet = Fleet()
    for index in range(size):
        number = fleet.add(f"verifier-{index}:50061")
        fleet.update(number, load=int(random.integers(15, 22)), rows=64, fill=0.3, room=1000)
        fleet.open(number, "model")
    return fleet


def prompts(num_tokens: int) -> list[list[int]]:
    """Return prompts, every second one with a shared first half."""
    random = np.random.default_rng(1)
    half = num_tokens // 2
    systems = [random.integers(0, 1 << 17, half).tolist() for _ in range(NUM_SYSTEMS)]
    return [
        (systems[index // 2 % NUM_SYSTEMS] if index % 2 else random.integers(0, 1 << 17, half).tolist())
        + random.integers(0, 1 << 17, num_tokens - half).tolist()
        for index in range(NUM_PROMPTS)
    ]


def median_us(router: Router, keys: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the median time of decisions in microseconds.

    The first is for new prompts, the second for prompts with a system prompt.
    """
    times = []
    for prompt in keys:
        began = time.perf_counter()
        router.route(prompt, model="model")
        times.append(1e6 * (time.perf_counter() - began))
    warm = times[len(times) // 2 :]
    return float(np.median(warm[::2])), float(np.median(warm[1::2]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how long the gateway takes to choose a verifier.")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompts")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a decision takes 50 us or more")
    options = parser.parse_args(argv)
    made = prompts(options.tokens)
    began = time.perf_counter()
    keys = [list(prefix_keys(prompt, None)) for prompt in made]
    hash_us = 1e6 * (time.perf_counter() - began) / len(made)
    print(f"hashing           {hash_us:.1f} us for a prompt of {options.tokens} tokens, all of it")
    slowest = 0.0
    for size in SIZES:
        new, shared = median_us(Router(loaded_fleet(size)), keys)
        slowest = max(new, shared)
        print(f"{size:5d} verifiers   {new:.1f} us for a new prompt, {shared:.1f} us behind a system prompt")
    return 1 if options.check and slowest >= MAX_US else 0


if __name__ == "__main__":
    sys.exit(main())
