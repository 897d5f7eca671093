"""Which of the target's passes FlashInfer is the attention of, by ``--attention-backend`` and what is there."""

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

# prompts: those without a graph, which are long prompts'; all: verify too, so that no step runs ahead of the host.
FlashInferPasses = Literal["none", "prompts", "all"]
# Of a chunk's tokens: a chunk of 2,048 was faster than by Triton on an H200, one of 512 was not.
_PAYS_FROM = 2048
# A compiler's output may be megabytes; what is wrong comes last.
_LONGEST_REASON = 2000


def flashinfer_passes(
    settings: VerifierSettings, config: ModelConfig, dtype: torch.dtype, backend: Backend, *, announce: bool = False
) -> FlashInferPasses:
    """As far as can be told without compiling. ``announce``: log why ``auto`` takes it for none.

    Raises ConfigError if it is asked for and cannot be had.
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
    """``passes``, with kernels compiled; "none" where ``auto`` would have them and they do not compile.

    Raises:
        ConfigError: they do not compile, and every pass was to have them.
    """
    if passes == "none":
        return passes
    progress(0, 1, "compiling FlashInfer's kernels")
    try:
        compile_kernels(config, dtype, backend.device)
    except Exception as error:
        # Another version may raise anything, and a server must not be down for want of what it can do without.
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
