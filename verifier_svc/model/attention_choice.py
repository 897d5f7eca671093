"""Choose which target passes use FlashInfer's attention, by setting and by machine."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import Progress
from foretoken.models.flashinfer_attention import compile_kernels, obstacle
from verifier_svc.config import VerifierSettings

_log = logging.getLogger(__name__)

# prompts: only passes over long prompts, which use no captured graph. all: verify passes too; then
# no step overlaps with the host.
FlashInferPasses = Literal["none", "prompts", "all"]
# Tokens of the smallest prefill chunk for FlashInfer. On an H200 it beat Triton at 2,048 tokens,
# not at 512.
_PAYS_FROM = 2048
# Most characters of a compiler's output to show. The output may be megabytes, with the error at its
# end.
_LONGEST_REASON = 2000


def flashinfer_passes(
    settings: VerifierSettings, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, announce: bool = False
) -> FlashInferPasses:
    """Return the passes that should use FlashInfer, as known before its kernels are compiled.

    Args:
        dtype: element type of the KV cache.
        announce: log the reason if ``auto`` does not use FlashInfer.

    Raises:
        ConfigError: ``--attention-backend flashinfer`` is set and FlashInfer cannot run here.
    """
    wanted = settings.attention_backend
    if wanted == "triton":
        return "none"
    problem = obstacle(config, dtype, backend.device)
    if settings.numerics == "strict":
        problem = "with --numerics strict a row has the same bits in any batch, which FlashInfer does not give"
    if wanted == "flashinfer":
        if problem is not None:
            raise ConfigError(f"--attention-backend flashinfer: {problem}")
        return "all"
    if problem is None and settings.chunked_prefill_size < _PAYS_FROM:
        problem = f"chunks of fewer than {_PAYS_FROM} tokens (--chunked-prefill-size)"
    if problem is not None:
        if announce:
            _log.info("attention: Triton's for every pass; %s", problem)
        return "none"
    return "prompts"


def compiled(
    passes: FlashInferPasses, config: ModelConfig, dtype: torch.dtype, backend: Backend, progress: Progress
) -> FlashInferPasses:
    """Compile FlashInfer's kernels for ``passes`` and return the passes that can use them.

    Returns ``passes``, or "none" if compiling fails under ``auto``.

    Raises:
        ConfigError: compiling fails and ``passes`` is "all".
    """
    if passes == "none":
        return passes
    progress(0, 1, "compiling FlashInfer's kernels")
    try:
        compile_kernels(config, dtype, backend.device)
    except Exception as error:
        # Another version may raise any exception, and the server can run without FlashInfer.
        reason = str(error)[-_LONGEST_REASON:]
        problem = f"FlashInfer's kernels cannot be had here (it needs nvcc, or flashinfer-jit-cache): {reason}"
        if passes == "all":
            raise ConfigError(f"--attention-backend flashinfer: {problem}") from error
        _log.warning("attention of prompts is Triton's: %s", problem)
        return "none"
    finally:
        progress(1, 1, "compiling FlashInfer's kernels")
    _log.info("attention: FlashInfer for %s", "every pass" if passes == "all" else "long prompts, Triton for the rest")
    return passes
