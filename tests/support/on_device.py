"""A fitted target with its drafters on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from drafter_svc.model.placement import ModelPlacement
from foretoken.models.backend import Backend
from foretoken.models.device_sizes import PassSizes
from foretoken.overlap_memory import StreamOrder
from tests.support.deployments import BLOCK, SeenHarness, Target
from tests.support.grammars import VOCAB
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.model.attention_choice import FlashInferPasses
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.overlap.step import OverlappedStep, plain_memory
from verifier_svc.sampling.device_walker import DeviceWalker

MAX_RUNNING = 8
MAX_LEN = 256
TIMEOUT_S = 600.0


def harness(  # noqa: PLR0913 - an engine's settings
    target: Target,
    algorithms: tuple[str, ...],
    device: str,
    *,
    num_blocks: int = 256,
    max_nodes: int = 8,
    graphs: bool = True,
    dtype: str = "float32",
    overlap: bool = True,
    simulated: float | None = None,
    num_steps: int = 3,
    strict: bool = False,
    flashinfer: FlashInferPasses = "none",
    **options: Any,
) -> SeenHarness:
    """Return an engine on the device.

    ``algorithms``: the drafters, on the device too, except n-grams. ``overlap``: whether steps
    overlap where they can. ``num_steps``: levels of a fixed tree shape; 0: shapes that pay.
    ``simulated``: as in OverlappedStep. ``strict``: whether a row of the target has the same bits in
    any batch. ``flashinfer``: as in DeviceRunner.
    """
    backend = Backend("gpu", torch.device(device))
    rows = 64 + MAX_RUNNING * (max_nodes + 4)
    sizes = PassSizes(rows, rows, MAX_RUNNING, MAX_LEN // BLOCK + 16, graphs=graphs)
    runner = DeviceRunner(
        target.folder,
        backend=backend,
        sizes=sizes,
        strict=strict,
        flashinfer=flashinfer,
        dtype=dtype,
        block_size=BLOCK,
        num_blocks=num_blocks,
    )
    walker = DeviceWalker(
        vocab_size=target.config.vocab_size,
        token_limit=VOCAB,
        max_batch_slots=MAX_RUNNING,
        max_rows=rows,
        max_nodes=max_nodes,
        device=backend.device,
        graphs=graphs,
    )
    make_step = partial(
        OverlappedStep,
        runner,
        walker,
        max_batch_rows=MAX_RUNNING,
        max_prompt_rows=rows,
        simulated=simulated,
        graphs=graphs,
    )
    plain = make_step(plain_memory(MAX_RUNNING, max_nodes, backend.device), StreamOrder())
    overlap_runs = OverlapRuns(make_step, plain, timeout_s=TIMEOUT_S)
    # In the interpreter there is nothing to compile.
    placement = ModelPlacement(backend, getattr(torch, dtype), graphs, warm=device == "cuda")
    drafters = {name.lower(): target.drafter(name, placement) for name in algorithms}
    made = target.harness(
        drafters,
        num_blocks=num_blocks,
        runner=runner,
        walker=walker,
        max_running=MAX_RUNNING,
        max_model_len=MAX_LEN,
        max_nodes=max_nodes,
        timeout_s=TIMEOUT_S,
        num_steps=num_steps,
        overlap_runs=overlap_runs if overlap else None,
        offer=DeviceOffer.of_backend(backend, num_steps or max_nodes - 1, runner.dtype, rows) if overlap else None,
        **options,
    )
    # The interpreter takes seconds for a draft, which never pays.
    made.speculator.costs.observe_overhead = lambda seconds, *, has_model: None  # type: ignore[method-assign]
    return made
