"""The arms of a served load: with which flags each server starts, and what its requests ask for.

This table is the one place that says so, for the GPU (benchmarks.gpu.serving) and for the CPU
(benchmarks.served_load).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Engine = Literal["foretoken", "vllm"]

EAGLE3 = "name=eagle3,algorithm=EAGLE3,model={head}"
NGRAM = "name=ngram,algorithm=NGRAM,placement=in-process"
# Requests of a fixed shape name the head, so that the server does not choose.
NAMED: Mapping[str, Any] = {"speculative": {"drafter": "eagle3"}}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of serving.

    Attributes:
        flags: the server's, beside those of all arms (``COMMON``);
            {head} is the draft head's folder.
        body: fields of every request.
    """

    name: str
    engine: Engine
    flags: tuple[str, ...]
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_drafters(self) -> int:
        """The number of drafters that foretoken attaches."""
        return self.flags.count("--drafter")

    @property
    def is_fixed(self) -> bool:
        """Whether every step drafts the same shape."""
        return self.body == NAMED

    def server_flags(self, head: Path, max_running: int) -> list[str]:
        """Return all flags of the server.

        Args:
            head: the folder of the draft head.
            max_running: requests that run at once.
        """
        words = {"head": str(head), "max_running": str(max_running)}
        return [_fill(flag, words) for flag in (*COMMON[self.engine], *self.flags)]


def _fill(flag: str, words: Mapping[str, str]) -> str:
    """Replace {word}s; a flag may have other braces."""
    for name, value in words.items():
        flag = flag.replace(f"{{{name}}}", value)
    return flag


def _fixed(steps: int, topk: int, tokens: int, *more: str, prefix: str = "fixed") -> Arm:
    shape = ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk))
    flags = ("--drafter", EAGLE3, *more, *shape, "--speculative-num-draft-tokens", str(tokens))
    return Arm(f"{prefix}-{steps}-{topk}-{tokens}", "foretoken", flags, NAMED)


def _vllm_eagle3(tokens: int) -> Arm:
    config = {"method": "eagle3", "model": "{head}", "num_speculative_tokens": tokens}
    return Arm(f"vllm-eagle3-{tokens}", "vllm", ("--speculative-config", json.dumps(config)))


# Flags of every arm. Neither server has a prefix cache.
COMMON: Mapping[Engine, tuple[str, ...]] = {
    "foretoken": ("--disable-radix-cache", "--max-running-requests", "{max_running}"),
    "vllm": (
        "--no-enable-prefix-caching",
        *("--max-num-seqs", "{max_running}"),
        *("--max-model-len", "2048"),
        *("--gpu-memory-utilization", "0.85"),
    ),
}

ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("plain", "foretoken", ("--speculative-algorithm", "NONE")),
        Arm("auto", "foretoken", ("--drafter", EAGLE3)),
        Arm("auto-ngram", "foretoken", ("--drafter", EAGLE3, "--drafter", NGRAM)),
        # What ``foretoken serve MODEL`` starts.
        Arm("ngram", "foretoken", ("--drafter", NGRAM)),
        _fixed(1, 1, 2),
        _fixed(3, 1, 4),
        _fixed(5, 1, 6),
        _fixed(5, 8, 32),
        # An n-gram drafter is there, and one request uses it.
        _fixed(5, 1, 6, "--drafter", NGRAM, prefix="fixed-ngram"),
        Arm("vllm-plain", "vllm", ()),
        _vllm_eagle3(3),
        _vllm_eagle3(5),
    )
}
