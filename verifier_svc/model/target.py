"""The target model where it is to run: its memory plan, its runner, and the walker that goes with it."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.decoder_weights import Progress
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import workspace_bytes
from foretoken.models.target_weights import TargetWeights
from foretoken.models.tokenizer_size import num_token_ids
from foretoken.models.weights import Checkpoint
from foretoken.transports.resident import StreamOrder
from foretoken.transports.shared_weights import SharedWeights
from foretoken.tree import MASK_WORD_BITS
from verifier_svc.config import VerifierSettings, refuse_gpu_flags
from verifier_svc.engine import TargetRunner
from verifier_svc.model.attention_choice import compiled, flashinfer_passes
from verifier_svc.model.memory_plan import MemoryPlan, make_plan
from verifier_svc.model.runner import ModelRunner, cache_bytes_per_token, context_tokens, element_type
from verifier_svc.overlap import RunAhead
from verifier_svc.sampling.walker import HostWalker, Walker

# Positions before the first computed one that are run again for a drafter, at most: of one sequence.
_MAX_RERUN = 4
# Rows of hidden states that are captured for drafters: EAGLE-3 takes three.
_CAPTURED = 4
# CUDA's context, its libraries, captured graphs and what their kernels need.
_FIXED_GPU_BYTES = 2 << 30


class LoadedTarget(TargetRunner, Protocol):
    """A ModelRunner, or a DeviceRunner."""

    config: ModelConfig
    max_model_len: int
    dtype: torch.dtype
    mode: Literal["strict", "fast"]
    target_weights: TargetWeights
    shared_weights: SharedWeights | None

    @property
    def fingerprint(self) -> str: ...


class Target(NamedTuple):
    """``shared_weights``: what drafters' processes may map; None: they read their own. ``run_ahead``: on a GPU, unless
    it is not wanted."""

    runner: LoadedTarget
    walker: Walker
    shared_weights: SharedWeights | None
    run_ahead: RunAhead | None = None


def memory_plan(settings: VerifierSettings, backend: Backend) -> MemoryPlan:
    """Where memory will go, without loading a weight. Raises ConfigError or CheckpointError."""
    if backend.kernels == "cpu":
        refuse_gpu_flags(settings.model_dump())
    config = load_config(settings.model)
    element = element_type(settings.dtype, backend)
    has_flashinfer = flashinfer_passes(settings, config, element, backend) != "none"
    with Checkpoint(settings.model) as checkpoint:
        stored = checkpoint.dtype(min(checkpoint.names)).itemsize
        weights_bytes = checkpoint.num_bytes // stored * element.itemsize
    on_gpu = backend.device.type == "cuda"
    return make_plan(
        settings,
        weights_bytes=weights_bytes,
        bytes_per_token=cache_bytes_per_token(config, settings.dtype, backend),
        max_model_len=context_tokens(config, settings.context_length),
        available=int(torch.cuda.mem_get_info()[0] * settings.mem_fraction_static) if on_gpu else None,
        buffers_bytes=(_buffers_bytes(settings, config, element) if on_gpu else 0)
        + (workspace_bytes(config, backend.device) if has_flashinfer else 0),
    )


def load_target(settings: VerifierSettings, budget: MemoryPlan, backend: Backend, progress: Progress) -> Target:
    """Load the model and warm it up. Raises ConfigError if strict numerics or FlashInfer cannot be had as wanted."""
    if backend.kernels == "cpu":
        runner = ModelRunner(
            settings.model,
            dtype=settings.dtype,
            threads=settings.threads,
            block_size=settings.block_size,
            num_blocks=budget.num_blocks,
            context_length=settings.context_length,
            progress=progress,
        )
        runner.warm_up(progress)
        _check_numerics(settings, runner)
        return Target(runner, HostWalker(), runner.shared_weights)
    # Triton is imported where there is a GPU alone.
    from verifier_svc.model.device_runner import DeviceRunner
    from verifier_svc.overlap_step import ResidentStep, plain_memory
    from verifier_svc.sampling.device_walker import DeviceWalker

    sizes = pass_sizes(settings)
    config, element = load_config(settings.model), element_type(settings.dtype, backend)
    wanted = flashinfer_passes(settings, config, element, backend, announce=True)
    flashinfer = compiled(wanted, config, element, backend, progress)
    on_device = DeviceRunner(
        settings.model,
        dtype=settings.dtype,
        backend=backend,
        sizes=sizes,
        strict=settings.numerics == "strict",
        flashinfer=flashinfer,
        block_size=settings.block_size,
        num_blocks=budget.num_blocks,
        context_length=settings.context_length,
        progress=progress,
    )
    on_device.warm_up(progress, max_nodes=settings.speculative_num_draft_tokens)
    _check_numerics(settings, on_device)
    walker = DeviceWalker(
        vocab_size=on_device.config.vocab_size,
        token_limit=num_token_ids(settings.model, on_device.config.vocab_size),
        max_slots=settings.max_running_requests,
        max_rows=sizes.wanted,
        max_nodes=settings.speculative_num_draft_tokens,
        device=backend.device,
        graphs=not settings.disable_cuda_graph,
    )
    walker.warm_up(on_device.config.vocab_size)
    # What is planned on the host waits for the lengths that the step before has come to.
    if settings.disable_overlap_schedule or flashinfer == "all":
        return Target(on_device, walker, on_device.shared_weights)
    make_step = partial(
        ResidentStep,
        on_device,
        walker,
        max_seats=settings.max_running_requests,
        simulated=settings.simulate_accept_length,
        graphs=not settings.disable_cuda_graph,
    )
    plain = make_step(plain_memory(settings.max_running_requests, backend.device), StreamOrder())
    plain.warm_up(())
    run_ahead = RunAhead(make_step, plain, timeout_s=settings.draft_timeout_ms / 1e3)
    return Target(on_device, walker, on_device.shared_weights, run_ahead)


def _check_numerics(settings: VerifierSettings, runner: LoadedTarget) -> None:
    """A warmed-up runner is as strict as was asked for."""
    if settings.numerics == "strict" and runner.mode != "strict":
        raise ConfigError(
            "--numerics strict: on this machine a row of this model has other bits in another batch; auto does without"
        )


def pass_sizes(settings: VerifierSettings) -> PassSizes:
    """The largest step: a chunk of prompts beside the trees of all running sequences."""
    config = load_config(settings.model)
    nodes = settings.speculative_num_draft_tokens
    rows = settings.chunked_prefill_size + settings.max_running_requests * (nodes + _MAX_RERUN)
    longest = context_tokens(config, settings.context_length) + nodes
    return PassSizes(
        rows=rows,
        wanted=rows,
        seqs=settings.max_running_requests,
        blocks=-(-longest // settings.block_size) + 1,
        mask_words=-(-nodes // MASK_WORD_BITS),
        graphs=not settings.disable_cuda_graph,
    )


def _buffers_bytes(settings: VerifierSettings, config: ModelConfig, element: torch.dtype) -> int:
    """What the passes of a DeviceRunner and its walker take, beside the cache."""
    rows = pass_sizes(settings).rows
    queries = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widths = config.hidden_size * (2 + _CAPTURED) + queries + config.hidden_size + 3 * config.intermediate_size
    logits = 4 * config.vocab_size
    penalties = settings.max_running_requests * config.vocab_size * 5
    return rows * (widths * element.itemsize + logits) + penalties + _FIXED_GPU_BYTES
