"""The bars for a served load (benchmarks.gpu.serving), in output tokens a second unless said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second: the bar and the goal."""

    must: float
    goal: float


# One H200, workload core.
RATES: Mapping[str, Mapping[int, Rate]] = {
    "auto": {
        1: Rate(720, 800),
        4: Rate(2_300, 2_700),
        16: Rate(6_600, 7_600),
        64: Rate(10_700, 12_500),
        128: Rate(12_900, 14_000),
        256: Rate(14_800, 15_500),
    },
    "plain": {
        1: Rate(220, 228),
        4: Rate(810, 850),
        16: Rate(2_800, 3_100),
        64: Rate(8_000, 8_500),
        128: Rate(11_200, 11_800),
        256: Rate(12_000, 13_500),
    },
}
# The better of vLLM 0.24's plain decode and its EAGLE-3, measured once on an H200.
VLLM_ONCE: Mapping[int, float] = {1: 684, 4: 2_156, 16: 6_236, 64: 10_100, 128: 12_298, 256: 14_302}
# A card on which vLLM's best stays below this share of VLLM_ONCE is slow: RATES give way there.
SLOW_CARD = 0.97
# Of the same run: auto over vLLM's best, by GPU, at these concurrencies.
OVER_VLLM: Mapping[str, float] = {"H200": 1.03, "H100": 1.0}
CONCURRENCIES: Mapping[str, tuple[int, ...]] = {"H200": (1, 4, 16, 64, 128, 256), "H100": (1, 16, 64)}
# auto over plain decode, and over the best fixed shape.
OVER_PLAIN, OVER_FIXED = 0.98, 0.95
# At most this concurrency has bars for gaps (p99) and for TTFT.
MOST_STREAMS = 64
# What a step may take with a pass over prompts before it, and what a gap may take more.
PREFILL_STEP_MS, GAP_SLACK_MS = 60.0, 10.0
LONGEST_GAP_MS = 150.0
# TTFT over that of vLLM's fastest arm.
TTFT_OVER_VLLM = 1.1
PREFILL_TOKENS_PER_S = 40_000.0
# The time between two chunks of the others beside one odd request, over that without it.
BESIDE_ODD = 1.10
# Of each arm's slowest start, and of the fastest of several, which finds compiled kernels.
READY_S, WARM_READY_S = 240.0, 90.0
# From ready until the drafters are attached.
ATTACH_S = 3.0
LEAST_REQUESTS = 5
