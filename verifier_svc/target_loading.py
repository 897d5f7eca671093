"""Load the target model, and build the walker and the overlapped steps for its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import Progress
from foretoken.models.element_type import element_type
from foretoken.models.kept_checks import checks_file
from foretoken.models.tokenizer_size import num_token_ids
from foretoken.overlap_memory import StreamOrder
from foretoken.transports.shared_weights import SharedWeights
from verifier_svc.config import VerifierSettings
from verifier_svc.model.attention_choice import compiled, flashinfer_passes
from verifier_svc.model.memory_plan import MemoryPlan
from verifier_svc.model.runner import ModelRunner
from verifier_svc.model.target import LoadedTarget, pass_sizes
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.sampling.walker import HostWalker, Walker


class Target(NamedTuple):
    """A loaded target model and its helpers.

    Attributes:
        shared_weights: weights that drafter processes can map. None: they read their own copies.
        overlap_runs: overlapped steps. None on a CPU, with FlashInfer for every pass, or if
            switched off.
    """

    runner: LoadedTarget
    walker: Walker
    shared_weights: SharedWeights | None
    overlap_runs: OverlapRuns | None = None


def load_target(
    settings: VerifierSettings,
    budget: MemoryPlan,
    backend: Backend,
    progress: Progress,
    on_loaded: Callable[[LoadedTarget], object] = lambda runner: None,
) -> Target:
    """Load the model and warm it up.

    ``on_loaded`` is called between the two, once nothing is timed on the GPU any more: what it
    starts may use the device while this compiles kernels.

    Raises:
        ConfigError: this machine lacks the numerics or the attention that the settings ask for.
    """
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
        on_loaded(runner)
        runner.warm_up(progress, checks_file())
        _check_numerics(settings, runner)
        return Target(runner, HostWalker(), runner.shared_weights)
    # Only a GPU imports Triton.
    from verifier_svc.model.device_runner import DeviceRunner
    from verifier_svc.overlap.step import OverlappedStep, plain_memory
    from verifier_svc.sampling.device_walker import DeviceWalker

    sizes = pass_sizes(settings)
    config, element = load_config(settings.model), element_type(settings.dtype, backend, settings.model)
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
    on_device.choose_matmuls(progress)
    on_loaded(on_device)
    on_device.warm_up(progress, max_nodes=settings.speculative_num_draft_tokens)
    _check_numerics(settings, on_device)
    walker = DeviceWalker(
        vocab_size=on_device.config.vocab_size,
        token_limit=num_token_ids(settings.model, on_device.config.vocab_size),
        max_batch_slots=settings.max_running_requests,
        max_rows=sizes.wanted,
        max_nodes=settings.speculative_num_draft_tokens,
        device=backend.device,
        graphs=not settings.disable_cuda_graph,
    )
    walker.warm_up(on_device.config.vocab_size)
    # FlashInfer plans each pass on the host from the lengths after the last step: nothing overlaps.
    if settings.disable_overlap_schedule or flashinfer == "all":
        return Target(on_device, walker, on_device.shared_weights)
    make_step = partial(
        OverlappedStep,
        on_device,
        walker,
        max_batch_rows=settings.max_running_requests,
        max_prompt_rows=settings.chunked_prefill_size,
        simulated=settings.simulate_accept_length,
        graphs=not settings.disable_cuda_graph,
    )
    memory = plain_memory(settings.max_running_requests, settings.speculative_num_draft_tokens, backend.device)
    plain = make_step(memory, StreamOrder())
    plain.warm_up(())
    overlap_runs = OverlapRuns(make_step, plain, timeout_s=settings.draft_timeout_ms / 1e3)
    return Target(on_device, walker, on_device.shared_weights, overlap_runs)


def _check_numerics(settings: VerifierSettings, runner: LoadedTarget) -> None:
    """Raise ConfigError if strict numerics are required and the warmed-up runner lacks them."""
    if settings.numerics == "strict" and runner.mode != "strict":
        raise ConfigError(
            "--numerics strict: on this machine a row of this model has other bits in another batch; auto does without"
        )
