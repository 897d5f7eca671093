"""Plan the target model's memory and the sizes of its passes."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from foretoken.models.backend import Backend
from foretoken.models.config import ModelConfig, load_config
from foretoken.models.device_sizes import PassSizes
from foretoken.models.element_type import element_type
from foretoken.models.flashinfer_attention import workspace_bytes
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weights import Checkpoint
from foretoken.transports.shared_weights import SharedWeights
from foretoken.tree import MASK_WORD_BITS
from verifier_svc.config import VerifierSettings, refuse_gpu_flags
from verifier_svc.model.attention_choice import flashinfer_passes
from verifier_svc.model.memory_plan import MemoryPlan, make_plan
from verifier_svc.model.runner import cache_bytes_per_token, context_tokens
from verifier_svc.model.target_runner import TargetRunner

# Most positions of one sequence that run again for a drafter.
_MAX_RERUN = 4
# Most layers whose hidden states are captured for drafters: EAGLE-3 takes three.
_CAPTURED = 4
# Bytes of the sampler's workspace for one row: the candidates of top-k and top-p.
_SAMPLER_ROW_BYTES = 33 << 10
# Bytes for CUDA's context and libraries, and for captured graphs if there are any.
_FIXED_GPU_BYTES, _GRAPH_BYTES = 3 << 29, 3 << 29


class LoadedTarget(TargetRunner, Protocol):
    """A ModelRunner or a DeviceRunner."""

    config: ModelConfig
    max_model_len: int
    dtype: torch.dtype
    mode: Literal["strict", "fast"]
    target_weights: TargetWeights
    shared_weights: SharedWeights | None
    checkpoint_hash: str

    @property
    def fingerprint(self) -> str: ...


def memory_plan(settings: VerifierSettings, backend: Backend) -> MemoryPlan:
    """Return the memory plan without loading weights. Raises ConfigError or CheckpointError.

    ``settings``: with sizes in place of ``auto`` (verifier_svc.model.sizes), here and below.
    """
    if backend.kernels == "cpu":
        refuse_gpu_flags(settings)
    config = load_config(settings.model)
    element = element_type(settings.dtype, backend, settings.model)
    has_flashinfer = flashinfer_passes(settings, config, element, backend) != "none"
    with Checkpoint(settings.model) as checkpoint:
        stored = checkpoint.dtype(min(checkpoint.names)).itemsize
        weights_bytes = checkpoint.num_bytes // stored * element.itemsize
    on_gpu = backend.device.type == "cuda"
    return make_plan(
        settings,
        weights_bytes=weights_bytes,
        bytes_per_token=cache_bytes_per_token(config, element),
        max_model_len=context_tokens(config, settings.context_length),
        available=int(torch.cuda.mem_get_info()[0] * settings.mem_fraction_static) if on_gpu else None,
        buffers_bytes=(_buffers_bytes(settings, config, element) if on_gpu else 0)
        + (workspace_bytes(config, backend.device) if has_flashinfer else 0),
    )


def pass_sizes(settings: VerifierSettings) -> PassSizes:
    """Return the largest step's sizes: a prefill chunk and the trees of all running sequences."""
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
    """Return the GPU bytes of a DeviceRunner's passes and its walker, without weights and cache."""
    rows = pass_sizes(settings).rows
    # For each token an int32 count, and whether it was seen.
    penalties = settings.max_running_requests * config.vocab_size * 5
    # Two prefill chunks wait in device memory for a drafter on this GPU.
    chunks = 2 * settings.chunked_prefill_size if settings.drafters else 0
    fixed = _FIXED_GPU_BYTES + (0 if settings.disable_cuda_graph else _GRAPH_BYTES)
    prompts = chunks * _CAPTURED * config.hidden_size * element.itemsize
    return rows * (pass_row_bytes(config, element) + _SAMPLER_ROW_BYTES) + penalties + prompts + fixed


def pass_row_bytes(config: ModelConfig, element: torch.dtype) -> int:
    """Return the bytes that one row of a pass on a GPU takes in its buffers."""
    attended = config.num_heads * config.head_dim
    # HIDDEN, OUTPUT and CAPTURED; then NORMED, which also takes attention's
    # rows whose logits are wanted.
    widths = config.hidden_size * (2 + _CAPTURED) + max(config.hidden_size, attended)
    widths += attended + attended + 2 * config.num_kv_heads * config.head_dim
    widths += 3 * config.intermediate_size
    return widths * element.itemsize + 4 * config.vocab_size
