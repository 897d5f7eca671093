"""A fitted target with its drafters on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from drafter_svc.placement import Placement
from foretoken.models.backend import Backend
from foretoken.models.device_sizes import PassSizes
from tests.support.deployments import BLOCK, SeenHarness, Target
from tests.support.grammars import VOCAB
from verifier_svc.device_runner import DeviceRunner
from verifier_svc.device_walker import DeviceWalker

MAX_RUNNING = 8
MAX_LEN = 256


def harness(
    target: Target,
    algorithms: tuple[str, ...],
    device: str,
    *,
    num_blocks: int = 256,
    max_nodes: int = 8,
    graphs: bool = True,
    dtype: str = "float32",
    **options: Any,
) -> SeenHarness:
    """``algorithms``: of the drafters, which run on the device too, but for n-grams."""
    backend = Backend("gpu", torch.device(device))
    rows = 64 + MAX_RUNNING * (max_nodes + 4)
    sizes = PassSizes(rows, rows, MAX_RUNNING, MAX_LEN // BLOCK + 16, graphs=graphs)
    runner = DeviceRunner(
        target.folder, backend=backend, sizes=sizes, dtype=dtype, block_size=BLOCK, num_blocks=num_blocks
    )
    walker = DeviceWalker(
        vocab_size=target.config.vocab_size,
        token_limit=VOCAB,
        max_slots=MAX_RUNNING,
        max_rows=rows,
        max_nodes=max_nodes,
        device=backend.device,
        graphs=graphs,
    )
    placement = Placement(backend, getattr(torch, dtype), graphs)
    drafters = {name.lower(): target.drafter(name, placement) for name in algorithms}
    return target.harness(
        drafters,
        num_blocks=num_blocks,
        runner=runner,
        walker=walker,
        max_running=MAX_RUNNING,
        max_model_len=MAX_LEN,
        max_nodes=max_nodes,
        # The interpreter takes seconds for a draft.
        timeout_s=600.0,
        **options,
    )
