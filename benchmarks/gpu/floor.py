"""The least time that a step can take: its bytes over the device's copy bandwidth.

    python -m benchmarks.gpu.floor

prints the device, its versions and its bandwidth as JSON. It is a program of its own so that whoever measures services
holds no memory of the GPU.
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
    """Bytes that a step must read: of the target once, of a draft head once and once a level, of the cache once."""

    target: int
    head_once: int
    head_level: int
    cache_per_token: int

    def of_step(self, levels: int, batch: int, context: int) -> int:
        """``levels``: of the draft tree, 0 for plain decode; ``context``: tokens of one sequence."""
        head = self.head_once + levels * self.head_level if levels else 0
        return self.target + head + batch * context * self.cache_per_token


def step_bytes(model: Path, head: Path) -> StepBytes:
    """Of a target and an EAGLE-3 head with an output head of its own, as stored. Embedding tables are not read."""
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
    """Bytes of each tensor but the tables between two vocabularies."""
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
    """What ``python -m benchmarks.gpu.floor`` prints."""
    command = [sys.executable, "-m", "benchmarks.gpu.floor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_device() -> dict[str, Any]:
    """Name, driver and bandwidth (bytes a second, read and written counted) of the first GPU, or of the processor."""
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
