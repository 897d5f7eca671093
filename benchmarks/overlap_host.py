"""Time the host's work for each sequence in overlapped steps, with a target that costs nothing.

    python -m benchmarks.overlap_host [--batch 64 256] [--nodes 1 4] [--ngram waited] [--steps 400]

It prints microseconds a sequence and step, by phase. Steps return ready-made results, a drafter
takes its requests and does nothing, and nobody reads the events. ``--nodes``: of each tree, with
its root; 1: no model. ``--ngram``: an n-gram drafter looks texts up besides; prompts and outputs
are then pieces of the standard library's source code. Each step waits for it (``waited``) or none
(``scouted``). ``--profile``: which functions take the time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.environment import ROOT
from benchmarks.prompts import code_prompts
from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.batch import ForwardBatch
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.engine_counters import EngineCounters
from verifier_svc.lifecycle import Lifecycle, SequenceBounds
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.outbox import Outbox
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.sampling.device_walker import walk_results
from verifier_svc.scheduling.batch_row import BatchRow, BatchRowResult
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.server import spare_collections
from verifier_svc.speculation.costs import StepCosts
from verifier_svc.speculation.speculator import Speculator

VOCAB, BLOCK, PROMPT = 128_000, 16, 128
EPOCH = 1
PHASES = ("plan", "draft_post", "prefill", "lookup", "launch", "commit")
# Steps before the measured ones.
WARM_STEPS = 20
# Different results of a step.
NUM_RESULTS = 64
# Nodes of the trees that look-ups find, with their root.
NGRAM_NODES = 8


class FreeStep:
    """The part of OverlappedStep that OverlapRuns uses, with results that were made before."""

    def __init__(self, memory: OverlapMemory, results: list[dict[str, np.ndarray]], outbox: Outbox) -> None:
        self.memory, self._results, self._outbox = memory, results, outbox
        self.number = 0
        self.rows: list[BatchRow | None] = []
        self._in_flight: deque[tuple[tuple[BatchRow | None, ...], Mapping[int, Draft]]] = deque()

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._in_flight)

    @property
    def max_tokens(self) -> int:
        return self.memory.layout.tokens

    @property
    def in_flight(self) -> FreeStep:
        """Return itself: it keeps its own steps in flight."""
        return self

    @property
    def batch_rows(self) -> FreeStep:
        """Return itself: it keeps its own batch rows."""
        return self

    def warm_up(self, captured_layers: tuple[int, ...]) -> None:
        """Compile nothing."""

    def begin(self, captured_layers: tuple[int, ...], number: int) -> None:
        self.number, self.rows = number, [None] * self.memory.layout.batch_rows

    def free_row(self) -> int:
        return self.rows.index(None)

    def join(self, index: int, batch_row: BatchRow) -> None:
        self.rows[index] = batch_row

    def leave(self, index: int) -> None:
        self.rows[index] = None

    def resize(self, index: int, width: int) -> None:
        batch_row = self.rows[index]
        assert batch_row is not None
        batch_row.width = width

    def share_rows(self, budget: int) -> None:
        """Do nothing: rows cost nothing."""

    def num_rows(self, batch_row: BatchRow) -> int:
        return batch_row.width

    @property
    def is_bound(self) -> bool:
        return True

    def prefill(self, batch: ForwardBatch, parts: Items[tuple[int, int]]) -> int:
        """Compute nothing; return where hidden states would begin."""
        return 0

    def launch(self, *, is_drafted: bool, found: Mapping[int, Draft]) -> bool:
        self.number += 1
        self._in_flight.append((tuple(self.rows), found))
        return False

    def release(self) -> None:
        """Wait for nobody."""

    def is_done(self) -> bool:
        self._outbox.take()
        return True

    def wait(self) -> None:
        """Do nothing: results are there."""

    def receive(self) -> list[BatchRowResult]:
        batch_rows, drafts = self._in_flight.popleft()
        taken = [(index, batch_row) for index, batch_row in enumerate(batch_rows) if batch_row is not None]
        results = self._results[self.number % len(self._results)]
        walks = walk_results(results, [(index, batch_row.drafter_number) for index, batch_row in taken])
        num_nodes = results["num_nodes"].tolist()
        return [
            BatchRowResult(batch_row, walk, num_nodes[index], drafts.get(index))
            for (index, batch_row), walk in zip(taken, walks, strict=True)
        ]


class SilentDrafter:
    """A DraftSource and its transport, whose requests go nowhere."""

    name, algorithm, address, transport_name, state, reason = "silent", "EAGLE3", "", "in-process", "attached", ""
    num_rejected, num_attaches = 0, 1

    def __init__(self, memory: OverlapMemory) -> None:
        self.needs = DrafterNeeds((1,), num_rerun=1, blocks=True)
        self.gauges: dict[str, float] = {}
        self.overlap_memory, self.order = memory, StreamOrder()

    @property
    def transport(self) -> SilentDrafter:
        return self

    def start(self) -> None:
        """Do nothing: it is attached."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def report_failure(self, reason: str) -> None:
        raise AssertionError(reason)

    def report_success(self) -> None:
        """Ignore it."""

    def is_open(self) -> bool:
        return True

    def is_idle(self) -> bool:
        return True

    def release(self, batch_slots: Items[int]) -> None:
        """Ignore it: no sequence is known."""

    def receive(self, timeout_s: float) -> DraftBatch | None:
        return None

    def post(self, request: DraftRequest) -> None:
        """Drop the request."""


class StopAfter:
    """The engine's side of a run, which stops it after some steps. Takes the times in between."""

    def __init__(self, step: FreeStep, counters: EngineCounters, num_steps: int) -> None:
        self._step, self._counters = step, counters
        self._num_steps = num_steps
        self._before: dict[str, float] = {}
        self.profile: cProfile.Profile | None = None
        self.is_stopping = False
        self.seconds: dict[str, float] = {}

    def handle_messages(self) -> None:
        if self._step.number == WARM_STEPS - 1:
            spare_collections()
        if self._step.number == WARM_STEPS:
            self._before = dict(self._counters.phase_seconds)
            if self.profile is not None:
                self.profile.enable()
        if self._step.number >= WARM_STEPS + self._num_steps and not self.is_stopping:
            self.is_stopping = True
            if self.profile is not None:
                self.profile.disable()
            after = self._counters.phase_seconds
            self.seconds = {name: after.get(name, 0.0) - self._before.get(name, 0.0) for name in PHASES}


def source_code() -> NDArray[np.int32]:
    """Return tokens of the standard library's source code."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "demo" / "target" / "tokenizer.json"))
    return np.array([token for prompt in code_prompts(tokenizer, 256) for token in prompt.token_ids], np.int32)


def ngram_source(batch: int, length: int, nodes: int) -> InProcessClient:
    """Return an n-gram drafter in this process."""
    target = TargetInfo(
        checkpoint_hash="", vocab_size=VOCAB, max_model_len=length, max_batch_slots=batch, max_nodes=nodes
    )
    return InProcessClient("ngram", NgramDrafter(NgramSettings()), target, EPOCH)


def ready_results(batch: int, nodes: int, text: NDArray[np.int32] | None) -> list[dict[str, np.ndarray]]:
    """Return what the device finds in a few steps, each sequence with a chain of ``nodes`` nodes.

    Tokens are pieces of ``text``, or else random.
    """
    draw = np.random.default_rng(1)
    results = []
    for _ in range(NUM_RESULTS):
        matched = draw.integers(0, nodes, batch).astype(np.int32)
        if text is None:
            tokens = draw.integers(0, VOCAB, (batch, nodes)).astype(np.int32)
        else:
            tokens = text[draw.integers(0, len(text) - nodes, batch)[:, None] + np.arange(nodes)]
        results.append(
            {
                "tokens": tokens,
                "accepted": np.tile(np.arange(1, nodes + 1, dtype=np.int32), (batch, 1)),
                "num_walked": matched + 1,
                "num_tokens": matched + 1,
                "num_matched": matched,
                "num_accepted": matched,
                "finish": np.zeros(batch, np.int32),
                "num_nodes": np.full(batch, nodes, np.int32),
            }
        )
    return results


def measure(
    batch: int,
    nodes: int,
    num_steps: int,
    profile: cProfile.Profile | None,
    text: NDArray[np.int32] | None,
    *,
    waits: bool = True,
) -> dict[str, float]:
    """Return the seconds of ``num_steps`` steps by phase.

    With ``text``, an n-gram drafter looks it up; ``waits``: each step waits for that.
    """
    most_nodes = max(nodes, 2) if text is None else max(nodes, NGRAM_NODES)
    output = nodes * (WARM_STEPS + num_steps + 8)
    length = PROMPT + output + nodes + 1
    blocks = BlockManager(batch * (length // BLOCK + 8), BLOCK)
    scheduler = Scheduler(blocks, max_running=batch, max_waiting=batch, prefill=PrefillBudget(batch * PROMPT))
    layout = OverlapLayout(batch, most_nodes, most_nodes, 1, torch.float32, batch * PROMPT)
    memory = OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    sources: list[Any] = [SilentDrafter(memory)] if nodes > 1 else []
    if text is not None:
        sources.append(ngram_source(batch, length, most_nodes))
    speculator = Speculator(
        sources,
        StepCosts({1: 1e-3, batch * nodes: 1.01e-3}),
        AttachmentSettings(EPOCH, VOCAB, BLOCK, 60.0),
        # A fixed shape is always waited for. Else look-ups must save more than the whole step.
        TreeBounds(most_nodes, most_nodes - 1 if waits else 0, 1),
        max_batch_size=0,
    )
    counters = EngineCounters()
    lifecycle = Lifecycle(scheduler, speculator, counters, SequenceBounds(length, frozenset(), VOCAB), "model")
    outbox = Outbox(lambda: None)
    session = lifecycle.sessions.open(outbox)
    draw = random.Random(1)
    for index in range(batch):
        if text is None:
            prompt = tuple(draw.randrange(VOCAB) for _ in range(PROMPT))
        else:
            start = draw.randrange(len(text) - PROMPT)
            prompt = tuple(text[start : start + PROMPT].tolist())
        sampling = SamplingParams(temperature=0.0, max_tokens=output)
        key = SequenceKey(session, f"request-{index:027}", 0)
        lifecycle.handle(
            Submit(key, 0, prompt, (), sampling, speculation=SpeculationOptions(), cache_salt=None, deadline=None), 0.0
        )
    step = FreeStep(memory, ready_results(batch, nodes, text), outbox)
    speculator.begin_step(scheduler.running)
    ahead = OverlapRuns(lambda memory, order: step, step, timeout_s=60.0)  # type: ignore[arg-type, return-value]
    messages = StopAfter(step, counters, num_steps)
    messages.profile = profile
    blocked = ahead.run(scheduler, speculator, lifecycle, messages)
    assert blocked is None and messages.seconds, f"the steps did not overlap: {blocked}"
    return messages.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ngram", choices=("waited", "scouted"), help="look n-grams up besides")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the functions that take the time")
    args = parser.parse_args()
    if args.ngram == "scouted" and args.nodes != [1]:
        parser.error("--ngram scouted needs --nodes 1")
    text, waits = source_code() if args.ngram else None, args.ngram != "scouted"
    for batch in args.batch:
        for nodes in args.nodes:
            profile = cProfile.Profile(time.thread_time) if args.profile else None
            rounds = [measure(batch, nodes, args.steps, profile, text, waits=waits) for _ in range(args.repeats)]
            scale = 1e6 / args.steps / batch
            best = {name: min(each[name] for each in rounds) * scale for name in PHASES}
            parts = " ".join(f"{name} {best[name]:.2f}" for name in PHASES)
            print(f"batch {batch}, {nodes} nodes: {sum(best.values()):.2f} us a sequence and step: {parts}", flush=True)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
