"""The bars for step times on one H200, the peers' figures they rest on, and a full run's rows.

All bars are for the shape of Llama-3.1-8B in bfloat16, with 128-token prompts and 256 decoded
tokens. Times are medians, in milliseconds a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GPU = "H200"
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 256
MIN_STEPS = 200
# Highest ratio of step times: gateway to verifier alone, and two processes to one.
MAX_OVERHEAD = 1.03
# Least share of the copy bandwidth at batch 1, for the target's pass over a tree of 32 nodes and
# for one level of a 5-8-32 draft.
MIN_VERIFY_SHARE, MIN_LEVEL_SHARE = 0.75, 0.70
# Largest share of a steady decode step in which the GPU may be idle (benchmarks.gpu.idle).
MAX_IDLE = 0.02
# A step with one 5-8-32 tree and 15 roots may take RAGGED_VERIFY times a step of 48 plain rows,
# plus the draft of one such tree, plus RAGGED_SLACK_MS (benchmarks.gpu.mixed).
RAGGED_VERIFY = 1.05
RAGGED_SLACK_MS = 0.1
PEERS_SOURCE = (
    "SGLang 0.5.15 (FlashInfer, CUDA graphs) and vLLM 0.24.0 (FlashAttention 3, torch.compile, full CUDA graphs), "
    "measured on one H200 with random weights, the same prompts and lengths, acceptance forced"
)

# Where a step is timed. processes: at the verifier, with the drafter in its own process; gateway:
# the same stack, seen by a client of the REST API; in-process: at the verifier, with the drafter
# inside it.
Path = Literal["processes", "gateway", "in-process"]
PATHS: tuple[Path, ...] = ("processes", "gateway", "in-process")
BATCHES = (1, 4, 16)
GATEWAY_BATCHES = (1, 16)


@dataclass(frozen=True, slots=True)
class DecodingFlags:
    """One way of decoding.

    ``steps``, ``topk`` and ``tokens`` are the values of --speculative-num-steps,
    --speculative-eagle-topk and --speculative-num-draft-tokens; 0 means plain decode.
    """

    name: str
    steps: int = 0
    topk: int = 0
    tokens: int = 0
    accept_length: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.steps == 0


@dataclass(frozen=True, slots=True)
class StepBar:
    """Milliseconds a step: the bar, the goal, and the peers' times."""

    must: float
    goal: float
    peers: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a row of a run."""

    setting: str
    batch: int
    path: Path

    def __str__(self) -> str:
        return f"{self.setting}, batch {self.batch}, {self.path}"


SETTINGS = (
    DecodingFlags("plain"),
    DecodingFlags("chain 3-1-4", 3, 1, 4, 3.0),
    DecodingFlags("chain 5-1-6", 5, 1, 6, 4.0),
    DecodingFlags("tree 5-8-32", 5, 8, 32, 4.0),
    DecodingFlags("tree 5-8-64", 5, 8, 64, 4.0),
    DecodingFlags("fused 1-1-2", 1, 1, 2, 2.0),
)

BARS: dict[tuple[str, int], StepBar] = {
    ("plain", 1): StepBar(4.5, 4.3, (("SGLang", 4.81), ("vLLM", 4.90))),
    ("plain", 4): StepBar(4.7, 4.4, (("SGLang", 5.02), ("vLLM", 4.98))),
    ("plain", 16): StepBar(4.85, 4.6, (("SGLang", 5.14), ("vLLM", 5.16))),
    ("chain 3-1-4", 1): StepBar(5.3, 5.0, (("vLLM", 5.90),)),
    ("chain 3-1-4", 4): StepBar(5.5, 5.2, (("vLLM", 6.01),)),
    ("chain 3-1-4", 16): StepBar(6.0, 5.6, (("vLLM", 6.35),)),
    ("chain 5-1-6", 1): StepBar(5.8, 5.4, (("vLLM", 6.49),)),
    ("chain 5-1-6", 4): StepBar(6.0, 5.6, (("vLLM", 6.67),)),
    ("chain 5-1-6", 16): StepBar(6.8, 6.4, (("vLLM", 7.20),)),
    ("tree 5-8-32", 1): StepBar(6.3, 5.8, (("SGLang", 8.57),)),
    ("tree 5-8-32", 4): StepBar(7.2, 6.6, (("SGLang", 9.65),)),
    ("tree 5-8-32", 16): StepBar(14.5, 13.0, (("SGLang", 18.46),)),
    ("tree 5-8-64", 1): StepBar(6.6, 6.1, (("SGLang", 9.07),)),
    ("tree 5-8-64", 16): StepBar(27.0, 24.0, (("SGLang", 31.5),)),
    ("fused 1-1-2", 1): StepBar(4.9, 4.6, (("SGLang", 6.34),)),
    ("fused 1-1-2", 16): StepBar(5.4, 5.1, (("SGLang", 6.90),)),
}


def required_rows() -> list[Key]:
    """Return the keys of all rows of a full run, in the order of measurement."""
    rows = []
    for setting in SETTINGS:
        rows += [Key(setting.name, batch, "processes") for batch in BATCHES if (setting.name, batch) in BARS]
        rows += [Key(setting.name, batch, "gateway") for batch in GATEWAY_BATCHES]
        if not setting.is_plain:
            rows.append(Key(setting.name, 1, "in-process"))
    return rows
