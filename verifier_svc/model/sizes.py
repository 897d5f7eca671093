"""Choose the sizes that the settings leave to the machine."""

from __future__ import annotations

from foretoken.errors import ConfigError
from foretoken.models.backend import Backend
from verifier_svc.config import DEFAULT_NODES, VerifierSettings
from verifier_svc.model.target import memory_plan

# Sequences that run at once: on a GPU the most whose tokens, buffers and sampler state fit.
CPU_RUNNING = 64
GPU_RUNNING = (512, 256, 128, 64)
# A GPU's KV cache fits a number of sequences if it has so many tokens for each, or a whole context.
# Those that grow longer take turns.
TOKENS_OF_ONE = 1024
# Prompt tokens of one step.
CPU_CHUNK = 512
GPU_CHUNK = 2048
# Nodes of a tree where the controller chooses its shape: small batches on a GPU gain by large
# trees, and larger batches do without (candidate_shapes).
GPU_NODES = 32


def with_sizes(settings: VerifierSettings, backend: Backend) -> VerifierSettings:
    """Return the settings with numbers in place of ``auto``. Raises as ``memory_plan``."""
    chunk = settings.chunked_prefill_size or chunk_size(backend)
    nodes = settings.speculative_num_draft_tokens or tree_nodes(settings, backend)
    settings = settings.model_copy(update={"chunked_prefill_size": chunk, "speculative_num_draft_tokens": nodes})
    if settings.max_running_requests:
        return settings
    return settings.model_copy(update={"max_running_requests": running_requests(settings, backend)})


def chunk_size(backend: Backend) -> int:
    """Return the prompt tokens of one step."""
    return GPU_CHUNK if backend.device.type == "cuda" else CPU_CHUNK


def tree_nodes(settings: VerifierSettings, backend: Backend) -> int:
    """Return the most nodes of a draft tree, with the root."""
    return GPU_NODES if backend.device.type == "cuda" and not settings.speculative_num_steps else DEFAULT_NODES


def running_requests(settings: VerifierSettings, backend: Backend) -> int:
    """Return how many sequences run at once."""
    if backend.device.type != "cuda":
        return CPU_RUNNING
    *larger, smallest = GPU_RUNNING
    return next((count for count in larger if _fits(settings, backend, count)), smallest)


def _fits(settings: VerifierSettings, backend: Backend, count: int) -> bool:
    try:
        plan = memory_plan(settings.model_copy(update={"max_running_requests": count}), backend)
    except ConfigError:
        # Buffers leave no room for the cache. If the smallest count
        # does not help, the plan says so.
        return False
    return plan.num_tokens >= count * min(plan.max_model_len, TOKENS_OF_ONE)
