"""Compute the least time of a step: the bytes that it reads over the device's copy bandwidth.

    python -m benchmarks.gpu.floor

It prints the device, its versions and its bandwidth as JSON. It is a program of its own: a process
that measures services then holds no GPU memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, machine

COPY_BYTES = 2 * 1024**3
COPY_BYTES_CPU = 256 * 1024**2
COPIES = 10


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes that a step must read.

    Attributes:
        target: read once a step.
        head_once: of the draft head, read once a step.
        head_level: of the draft head, read once for each level of the tree.
        cache_per_token: of the KV cache, read once for each token of context.
    """

    target: int
    head_once: int
    head_level: int
    cache_per_token: int

    def of_step(self, levels: int, batch: int, context: int) -> int:
        """Return the bytes of one step.

        Args:
            levels: levels of the draft tree; 0 for plain decode.
            context: tokens of one sequence.
        """
        head = self.head_once + levels * self.head_level if levels else 0
        return self.target + head + batch * context * self.cache_per_token


def step_bytes(model: Path, head: Path) -> StepBytes:
    """Return the bytes of a stored target and of an EAGLE-3 head with its own output head.

    Embedding tables do not count, because a step reads few of their rows.
    """
    from foretoken.models.config import load_config
    from foretoken.models.weights import Checkpoint

    config = load_config(model)
    with Checkpoint(model) as checkpoint:
        sizes = _sizes(checkpoint)
        embedding = 0 if config.tie_word_embeddings else sizes["model.embed_tokens.weight"]
        target = sum(sizes.values()) - embedding
        element = checkpoint.dtype("model.embed_tokens.weight").itemsize
    with Checkpoint(head) as checkpoint:
        sizes = _sizes(checkpoint)
        once = sizes["fc.weight"]
        level = sum(sizes.values()) - once - sizes.get("embed_tokens.weight", 0)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element
    return StepBytes(target, once, level, cache)


def _sizes(checkpoint: Any) -> dict[str, int]:
    """Return the bytes of each tensor, without the tables that map one vocabulary to the other."""
    sizes = {}
    for name in checkpoint.names:
        if name in ("d2t", "t2d"):
            continue
        count = checkpoint.dtype(name).itemsize
        for size in checkpoint.shape(name):
            count *= size
        sizes[name] = count
    return sizes


def describe_device() -> dict[str, Any]:
    """Run ``python -m benchmarks.gpu.floor`` and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.gpu.floor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_device() -> dict[str, Any]:
    """Return name, driver and copy bandwidth of the first GPU, or of the processor without a GPU.

    The bandwidth is in bytes a second; bytes read and bytes written both count.
    """
    import torch

    if not torch.cuda.is_available():
        return {"gpu": f"none: {machine()}", "driver": "", "cuda": "", "bandwidth": _bandwidth("cpu")}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "bandwidth": _bandwidth("cuda"),
    }


def _bandwidth(device: str) -> float:
    import torch

    source = torch.ones(COPY_BYTES if device == "cuda" else COPY_BYTES_CPU, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        _wait(device)
        began = time.perf_counter()
        copy.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * len(source) / best


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(measure_device()))
