"""Time passes without CUDA graphs for each attention backend: prefill and verify.

    python -m benchmarks.gpu.checkpoint --output DIR
    python -m benchmarks.gpu.attention --model DIR/target [--profile]

It runs in one process, without services and without tuned matmuls. Without FlashInfer, only Triton
is timed. With few rows the host decides the time; use ``--profile`` to compare the backends there.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.passes import BATCHES, BLOCK, MAX_BATCH, device_ms, load_target, show_profile, verify_batch
from foretoken.models.backend import choose_backend
from foretoken.models.batch import chain_batch
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention, obstacle

# Imported for types only: it needs triton, and --help answers without triton.
if TYPE_CHECKING:
    from verifier_svc.model.device_runner import DeviceRunner

# Prefill chunks: (tokens of the chunk, tokens before it).
CHUNKS = ((512, 0), (2048, 0), (2048, 14336))
ROWS = (1, 6, 32)


def measure(runner: DeviceRunner, profile: bool) -> None:
    """Print the times of the passes.

    The first launches compile kernels; FlashInfer's take a minute or two.
    """
    from foretoken.models.device_llama import DeviceLlama

    config, cache = runner.config, runner.cache
    wanted = MAX_BATCH * max(ROWS)
    longest = max(sum(chunk) for chunk in CHUNKS)
    rows = max(wanted, *(tokens for tokens, _ in CHUNKS))
    sizes = PassSizes(rows, wanted, MAX_BATCH, longest // BLOCK + 1, graphs=False)
    backends: dict[str, FlashInferAttention | None] = {"triton": None}
    problem = obstacle(config, runner.dtype, cache.data.device)
    if problem is None:
        backends["flashinfer"] = FlashInferAttention(config, cache, every_pass=True)
    else:
        print(f"no passes by FlashInfer: {problem}", flush=True)
    chunks = [
        chain_batch(np.arange(tokens, dtype=np.int32) % 8000, first, BLOCK, np.array([tokens - 1], np.int32))
        for tokens, first in CHUNKS
    ]
    for name, attention in backends.items():
        model = DeviceLlama(config, runner.weights, cache, longest, sizes, flashinfer=attention)
        began = time.perf_counter()
        for batch in (*chunks, verify_batch([max(ROWS)] * 2)):
            model.forward(batch)
        torch.cuda.synchronize()
        print(f"{name}: first passes in {time.perf_counter() - began:.1f} s", flush=True)
        found = [
            f"{tokens} behind {first}: {device_ms(partial(model.forward, batch), 5):.3f}"
            for (tokens, first), batch in zip(CHUNKS, chunks, strict=True)
        ]
        print(f"target, {name}, ms by tokens of a prompt  " + "  ".join(found), flush=True)
        for batch_size in BATCHES:
            found = []
            for count in ROWS:
                made = verify_batch([count] * batch_size)
                found.append(f"{count}: {device_ms(partial(model.forward, made), 10):.3f}")
            print(f"target, {name}, no graphs, batch {batch_size}, ms by rows  " + "  ".join(found), flush=True)
        if profile:
            show_profile(f"target, {name}, {CHUNKS[-1]}", partial(model.forward, chunks[-1]))
            show_profile(f"target, {name}, 16 x 32 rows", partial(model.forward, verify_batch([32] * MAX_BATCH)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some passes")
    args = parser.parse_args()
    measure(load_target(args.model, choose_backend("cuda")), args.profile)


if __name__ == "__main__":
    main()
