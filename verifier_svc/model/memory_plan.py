"""Plan memory once, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import ConfigError
from verifier_svc.config import VerifierSettings
from verifier_svc.model.available_memory import available_memory

# Share of free memory for a cache of unset size on a CPU, because other programs need memory too.
CACHE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes of each part, and the resulting cache size."""

    weights_bytes: int
    # On a GPU: buffers of passes, logits and sampler, and captured graphs. 0 on a CPU.
    buffers_bytes: int
    bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_running_requests: int
    available_bytes: int

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        rows = (
            ("weights", _mib(self.weights_bytes), ""),
            *((("buffers", _mib(self.buffers_bytes), ""),) if self.buffers_bytes else ()),
            (
                "KV cache",
                _mib(self.cache_bytes),
                f"{self.num_blocks} blocks of {self.block_size} tokens, {self.bytes_per_token} bytes a token",
            ),
            ("available", _mib(self.available_bytes), ""),
        )
        lines = [f"  {name:<10} {size:>12}  {note}".rstrip() for name, size, note in rows]
        lines.append(
            f"  capacity   {self.num_tokens} tokens: {self.num_tokens // self.max_model_len} sequences of the whole "
            f"context ({self.max_model_len}), at most {self.max_running_requests} running"
        )
        return "\n".join(["memory plan", *lines])


def make_plan(
    settings: VerifierSettings,
    *,
    weights_bytes: int,
    bytes_per_token: int,
    max_model_len: int,
    available: int | None = None,
    buffers_bytes: int = 0,
) -> MemoryPlan:
    """Return the memory plan for these settings.

    Args:
        weights_bytes: bytes of the weights.
        bytes_per_token: cache bytes of one token.
        max_model_len: tokens of context. A sequence also needs room for a tree after its last
            token.
        available: bytes for weights, buffers and cache. None: the host's free memory; the cache
            then takes CACHE_SHARE of the rest.
        buffers_bytes: bytes of GPU buffers.

    Raises:
        ConfigError: the cache cannot hold one sequence, or memory cannot hold the wanted cache. The
            error names the flag to change.
    """
    share = CACHE_SHARE if available is None else 1.0
    available = available_memory() if available is None else available
    fixed_bytes = weights_bytes + buffers_bytes
    if settings.max_total_tokens and fixed_bytes + settings.max_total_tokens * bytes_per_token > available:
        raise ConfigError(
            f"--max-total-tokens {settings.max_total_tokens} takes {_mib(settings.max_total_tokens * bytes_per_token)} "
            f"beside {_mib(fixed_bytes)} of weights and buffers; {_mib(available)} of memory are available"
        )
    longest = max_model_len + settings.speculative_num_draft_tokens
    blocks_of_one = -(-longest // settings.block_size)
    if settings.max_total_tokens:
        num_blocks = settings.max_total_tokens // settings.block_size
        if num_blocks < blocks_of_one:
            raise ConfigError(
                f"--max-total-tokens: expected at least {blocks_of_one * settings.block_size} (one context and a draft "
                f"tree, {longest} tokens, in blocks of {settings.block_size}), got {settings.max_total_tokens}; "
                "with a lower --context-length fewer will do"
            )
    else:
        affordable = int((available - fixed_bytes) * share) // (bytes_per_token * settings.block_size)
        num_blocks = min(affordable, blocks_of_one * settings.max_running_requests)
        if num_blocks < blocks_of_one:
            raise ConfigError(
                f"{_mib(available)} of memory are available, too little for one sequence of {longest} tokens: "
                "lower --context-length or set --max-total-tokens"
            )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        buffers_bytes=buffers_bytes,
        bytes_per_token=bytes_per_token,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_running_requests=settings.max_running_requests,
        available_bytes=available,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
