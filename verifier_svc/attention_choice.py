"""Which of the target's passes FlashInfer is the attention of, by ``--attention-backend`` and what is there."""

from __future__ import annotations

import logging
import subprocess
from typing import Literal

import torch

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from foretoken.models.config import ModelConfig
from foretoken.models.decoder_weights import Progress
from foretoken.models.flashinfer_attention import compile_kernels, obstacle
from verifier_svc.config import VerifierSettings

_log = logging.getLogger(__name__)

# prompts: those without a graph, which are long prompts'; all: verify too, so that no step runs ahead of the host.
FlashInferPasses = Literal["none", "prompts", "all"]
# A compiler's output may be megabytes; what is wrong comes last.
_LONGEST_REASON = 2000


def flashinfer_passes(
    settings: VerifierSettings, config: ModelConfig, dtype: torch.dtype, backend: Backend
) -> FlashInferPasses:
    """As far as can be told without compiling. Raises ConfigError if it is asked for and cannot be had."""
    wanted = settings.attention_backend
    if wanted == "triton":
        return "none"
    problem = obstacle(config, dtype, backend.device)
    if settings.numerics == "strict":
        problem = "with --numerics strict a row has the same bits in any batch, which FlashInfer does not give"
    if problem is None:
        return "all" if wanted == "flashinfer" else "prompts"
    if wanted == "flashinfer":
        raise ConfigError(f"--attention-backend flashinfer: {problem}")
    return "none"


def compiled(
    passes: FlashInferPasses, config: ModelConfig, dtype: torch.dtype, backend: Backend, progress: Progress
) -> FlashInferPasses:
    """``passes``, with kernels compiled; "none" where ``auto`` would have them and they do not compile.

    Raises:
        ConfigError: they do not compile, and every pass was to have them.
    """
    if passes == "none":
        return passes
    progress(0, 1, "compiling FlashInfer's kernels")
    try:
        compile_kernels(config, dtype, backend.device)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
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
