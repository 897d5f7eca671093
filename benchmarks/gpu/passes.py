"""Measure the GPU's own time for the parts of a step: the target's pass, and a draft.

    python -m benchmarks.gpu.checkpoint --output DIR
    python -m benchmarks.gpu.passes --model DIR/target --drafter-head DIR/eagle3 [--profile]

It runs in one process, without services. Passes are launched without waits between them, so the
device's work hides the host's. A draft has two times: of a whole call, which waits for its trees,
and of its graphs alone, each replayed by itself. A share is the least time to read the bytes at the
copy bandwidth (benchmarks.gpu.floor), divided by the measured time. The exit status is 1 if a share
misses its bar (benchmarks.gpu.bars). The target's bar is for fast mode.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.bars import MIN_LEVEL_SHARE, MIN_VERIFY_SHARE
from benchmarks.gpu.floor import StepBytes, measure_device, step_bytes
from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ModelPlacement
from foretoken.drafting import RAGGED_COLUMNS, ROW_COLUMNS, DraftRequest, TargetInfo
from foretoken.models.backend import Backend, choose_backend
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_sizes import PassSizes
from foretoken.models.element_type import element_type

# Modules that need triton are imported where they are used: --help answers without it.
if TYPE_CHECKING:
    from verifier_svc.model.device_runner import DeviceRunner

CONTEXT = 320
BLOCK = 16
MAX_MODEL_LEN = 2048
MAX_BATCH = 16
BATCHES = (1, 4, 16)
# Rows of one sequence: plain decode, chains, trees.
ROWS = (1, 2, 4, 6, 32, 64)
# The nodes of a tree beside sequences in plain decode, and the rows of the plain batch to compare
# with.
RAGGED_TREE, PLAIN_ROWS = 32, 48
# Steps, branches, nodes, and tokens accepted a step.
SHAPES = ((1, 1, 2, 2), (3, 1, 4, 3), (5, 1, 6, 4), (5, 8, 32, 4), (5, 8, 64, 4))
# The rows and the shape whose shares have bars.
BAR_ROWS, BAR_SHAPE = 32, (5, 8, 32, 4)
REPEATS = 30
BLOCKS_PER_SEQ = -(-(CONTEXT + 80) // BLOCK) + 1


class Floor(NamedTuple):
    """The bytes of a step and the copy ``bandwidth`` in bytes a second."""

    sizes: StepBytes
    bandwidth: float

    def share(self, num_bytes: int, ms: float) -> float:
        return num_bytes / self.bandwidth / (ms / 1e3)


class DraftPartTimes(NamedTuple):
    """Milliseconds of the device for the two parts of a draft.

    Attributes:
        entries: to write the KV entries of new tokens, with the logits of the roots.
        trees: to grow the trees.
    """

    entries: float
    trees: float

    def level(self, steps: int) -> float:
        """Return the time of one of the ``steps`` - 1 levels after the roots' own.

        It includes an equal share of the work that begins and ends a tree.
        """
        return self.trees / (steps - 1)


def verify_batch(rows: Sequence[int]) -> ForwardBatch:
    """Return a batch with a bushy tree of ``rows[i]`` nodes for sequence i.

    The parent of node n is node (n - 1) // 2.
    """
    most, total, batch = max(rows), sum(rows), len(rows)
    parents = (np.arange(most) - 1) // 2
    masks = np.zeros(most, np.uint64)
    depths = np.zeros(most, np.int32)
    for node in range(1, most):
        masks[node] = masks[parents[node]] | (np.uint64(1) << np.uint64(node))
        depths[node] = depths[parents[node]] + 1
    tables = np.arange(batch * BLOCKS_PER_SEQ, dtype=np.int32).reshape(batch, -1)
    nodes = np.concatenate([np.arange(count) for count in rows])
    seqs = np.repeat(np.arange(batch, dtype=np.int32), rows)
    logical = CONTEXT + nodes
    kv_slots = tables[seqs, logical // BLOCK] * BLOCK + logical % BLOCK
    return ForwardBatch(
        token_ids=np.arange(total, dtype=np.int32) % 8000,
        positions=(CONTEXT + depths[nodes]).astype(np.int32),
        kv_slots=kv_slots.astype(np.int32),
        row_seqs=seqs,
        context_lens=np.full(total, CONTEXT + 1, np.int32),
        masks=masks[nodes][:, None],
        tree_starts=np.full(batch, CONTEXT, np.int32),
        block_tables=tables,
        logit_rows=np.arange(total, dtype=np.int32),
    )


def draft_request(batch: int, shape: tuple[int, int, int, int], width: int, generation: int, step: int) -> DraftRequest:
    """Return the draft request after a step of the shape; step 0 sends the prompts."""
    steps, branches, nodes, accepted = shape
    new = accepted if step else CONTEXT
    length = CONTEXT + step * accepted
    tables = np.arange(batch * BLOCKS_PER_SEQ, dtype=np.int32).reshape(batch, -1)
    first_block = (length - new) // BLOCK
    blocks = tables[:, first_block : -(-length // BLOCK)]
    random = np.random.default_rng(step)
    num_hidden = new - (step == 0)
    constants = {
        "lengths": length,
        "prompt_lengths": CONTEXT,
        "max_nodes": nodes,
        "max_depths": steps,
        "max_branches": branches,
        "generations": generation,
        "top_ps": 1,
    }
    columns = {name: np.full(batch, constants.get(name, 0), dtype) for name, dtype in ROW_COLUMNS.items()}
    columns["batch_slots"] = np.arange(batch, dtype=np.int32)
    ragged = {
        "new_tokens": random.integers(0, 8000, (batch, new), np.int32),
        "hidden": random.standard_normal((batch, num_hidden, width)).astype(np.float32),
        "block_ids": blocks,
        "prediction": np.empty((batch, 0), np.int32),
    }
    for name, starts in RAGGED_COLUMNS.items():
        columns[starts] = np.arange(batch + 1, dtype=np.int32) * ragged[name].shape[1]
        columns[name] = ragged[name].reshape(-1, width) if name == "hidden" else ragged[name].reshape(-1)
    return DraftRequest.of_columns(1, step + 1, columns)


def device_ms(launch: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the milliseconds of one call among ``repeats`` calls without waits between them."""
    launch()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(repeats):
            launch()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / repeats)
    return min(times)


def draft_times(
    draft: Callable[[], object], measure: Callable[[Callable[[], object]], float] = device_ms
) -> DraftPartTimes:
    """Return the times of a draft, replaying each of its graphs many times.

    A replay leaves the same result each time.
    """
    from drafter_svc.device.levels import TreeShape

    found: dict[Hashable, float] = {}
    run = DeviceGraphs.run

    def timed(graphs: DeviceGraphs, key: Hashable, launch: Callable[[], None]) -> None:
        run(graphs, key, launch)
        found[key] = measure(lambda: run(graphs, key, launch))

    with mock.patch.object(DeviceGraphs, "run", timed):
        draft()
    trees = sum(ms for key, ms in found.items() if isinstance(key, TreeShape))
    return DraftPartTimes(sum(found.values()) - trees, trees)


def load_target(model: Path, backend: Backend, strict: bool = False) -> DeviceRunner:
    """Load the target and fill its KV cache with noise."""
    from verifier_svc.model.device_runner import DeviceRunner

    rows = MAX_BATCH * max(ROWS)
    began = time.perf_counter()
    runner = DeviceRunner(
        model,
        backend=backend,
        sizes=PassSizes(rows, rows, PLAIN_ROWS, BLOCKS_PER_SEQ),
        strict=strict,
        block_size=BLOCK,
        num_blocks=PLAIN_ROWS * BLOCKS_PER_SEQ,
        context_length=MAX_MODEL_LEN,
    )
    torch.nn.init.normal_(runner.cache.data, std=0.5)
    print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
    return runner


def measure_target(
    model: Path, backend: Backend, profile: bool, matmuls: Path | None, strict: bool, floor: Floor
) -> tuple[tuple[int, int], float]:
    """Print the times of the passes.

    Returns:
        The number of layers and the hidden size, and the share of BAR_ROWS rows.
    """
    rows = MAX_BATCH * max(ROWS)
    runner = load_target(model, backend, strict)
    # A strict pass has one matmul for each shape.
    for tuned in (False,) if strict else (False, True):
        if tuned:
            began = time.perf_counter()
            runner.tune(matmuls)
            print(f"matmuls timed in {time.perf_counter() - began:.1f} s", flush=True)
        for batch in BATCHES:
            counts = [count for count in ROWS if batch * count <= rows]
            times = [device_ms(partial(runner.forward, verify_batch([count] * batch))) for count in counts]
            shares = [floor.share(floor.sizes.of_step(0, batch, CONTEXT), ms) for ms in times]
            if batch == 1:
                bar_share = shares[counts.index(BAR_ROWS)]
            name = f"target{' tuned' if tuned else ''}, batch {batch}"
            print(f"{name}, ms by rows  " + _listed(counts, times, ".3f"), flush=True)
            print(f"{name}, share of the copy bandwidth by rows  " + _listed(counts, shares, ".1%"), flush=True)
    ragged, plain = [RAGGED_TREE] + [1] * (MAX_BATCH - 1), [1] * PLAIN_ROWS
    found = [f"{device_ms(partial(runner.forward, verify_batch(each))):.3f}" for each in (ragged, plain)]
    print(
        f"target, ms  a tree of {RAGGED_TREE} beside 15 roots: {found[0]}  {PLAIN_ROWS} roots: {found[1]}", flush=True
    )
    if profile:
        for batch, count in ((1, 1), (1, 32), (16, 1), (16, 6), (16, 32)):
            made = verify_batch([count] * batch)
            show_profile(f"target, batch {batch}, {count} rows", partial(runner.forward, made))
    return (runner.config.num_layers, runner.config.hidden_size), bar_share


def _listed(names: Sequence[int], values: Sequence[float], form: str) -> str:
    return "  ".join(f"{name}: {value:{form}}" for name, value in zip(names, values, strict=True))


def measure_draft(
    model: Path, head: Path, backend: Backend, size: tuple[int, int], profile: bool, floor: Floor
) -> float:
    """Print the times of the drafts, and return the share of a level of BAR_SHAPE."""
    (num_layers, hidden_size), sizes, bar_share = size, floor.sizes, 0.0
    began = time.perf_counter()
    drafter = HeadDrafter("EAGLE3", head, placement=ModelPlacement(backend, element_type("auto", backend, model)))
    drafter.attach(_info(model, num_layers, hidden_size), None)
    print(f"head attached in {time.perf_counter() - began:.1f} s", flush=True)
    generation = 0
    for shape in SHAPES:
        calls, parts, levels, drafts = [], [], [], []
        for batch in BATCHES:
            generation += 1
            request = partial(draft_request, batch, shape, 3 * hidden_size, generation)
            drafter.draft(request(0))
            # As many steps as the blocks of a sequence hold.
            steps = min(REPEATS, 60 // shape[3])
            times = []
            for step in range(1, steps):
                asked = request(step)
                began = time.perf_counter()
                drafter.draft(asked)
                times.append((time.perf_counter() - began) * 1e3)
            calls.append(statistics.median(times))
            if profile and shape[2] in (6, 32) and batch != 4:
                show_profile(f"draft {shape}, batch {batch}", partial(drafter.draft, request(steps)), 1)
                steps += 1
            device = draft_times(partial(drafter.draft, request(steps)))
            parts.append(f"{batch}: {device.entries:.3f} + {device.trees:.3f}")
            drafts.append(floor.share(sizes.head_once + shape[0] * sizes.head_level, sum(device)))
            if shape[0] > 1:
                levels.append(floor.share(sizes.head_level, device.level(shape[0])))
                if (shape, batch) == (BAR_SHAPE, 1):
                    bar_share = levels[-1]
        print(f"draft {shape}, ms by batch  " + _listed(BATCHES, calls, ".3f"))
        print(f"draft {shape}, ms of the device by batch, entries + trees  " + "  ".join(parts))
        print(f"draft {shape}, share of the copy bandwidth by batch  " + _listed(BATCHES, drafts, ".1%"), flush=True)
        if levels:
            print(f"a level of it, share of the copy bandwidth  {_listed(BATCHES, levels, '.1%')}", flush=True)
    return bar_share


def _info(model: Path, num_layers: int, hidden_size: int) -> TargetInfo:
    return TargetInfo(
        checkpoint_hash="benchmark",
        vocab_size=load_config(model).vocab_size,
        max_model_len=MAX_MODEL_LEN,
        max_batch_slots=MAX_BATCH,
        max_nodes=max(ROWS),
        hidden_size=hidden_size,
        num_layers=num_layers,
        block_size=BLOCK,
        num_blocks=MAX_BATCH * BLOCKS_PER_SEQ,
        checkpoint=str(model),
    )


def show_profile(title: str, launch: Callable[[], object], repeats: int = 5) -> None:
    """Print the kernels that take longest, in microseconds a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            launch()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / repeats
    print(f"{title}: {total:.0f} us on the device")
    for event in events[:12]:
        print(f"    {event.self_device_time_total / repeats:8.1f} us  {event.count / repeats:6.1f} x  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--drafter-head", type=Path, required=True, help="the EAGLE-3 head's folder")
    parser.add_argument("--matmuls", type=Path, default=None, help="file that keeps the choice of matmuls")
    parser.add_argument("--numerics", choices=("fast", "strict"), default="fast", help="of the target's passes")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some passes")
    args = parser.parse_args()
    backend = choose_backend("cuda")
    device = measure_device()
    torch.cuda.empty_cache()
    floor = Floor(step_bytes(args.model, args.drafter_head), device["bandwidth"])
    print(f"{device['gpu']}, {floor.bandwidth / 1e12:.3f} TB/s copied; {floor.sizes}", flush=True)
    strict = args.numerics == "strict"
    size, verify = measure_target(args.model, backend, args.profile, args.matmuls, strict, floor)
    level = measure_draft(args.model, args.drafter_head, backend, size, args.profile, floor)
    steps, branches, nodes, _ = BAR_SHAPE
    judged = [(f"a level of a {steps}-{branches}-{nodes} draft at batch 1", level, MIN_LEVEL_SHARE)]
    if not strict:
        judged.append((f"verify of {BAR_ROWS} nodes at batch 1", verify, MIN_VERIFY_SHARE))
    missed = []
    for what, share, bar in judged:
        verdict = "pass" if share >= bar else "FAIL"
        print(f"{what}: {share:.1%} of the copy bandwidth, must be at least {bar:.0%}: {verdict}")
        missed += [what] * (share < bar)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
