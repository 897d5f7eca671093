"""The verifier's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from foretoken.address import Address
from foretoken.drafter_spec import DrafterName
from foretoken.errors import ConfigError

Transport = Literal["auto", "shared-memory", "grpc"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


class DrafterEndpoint(BaseModel):
    """A drafter that this verifier was configured with. It may be down at any time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: DrafterName
    # unix:/path or host:port. A Unix socket means the same host: the arena is used.
    address: Address
    transport: Transport = "auto"


class VerifierSettings(BaseModel):
    """Settings of one verifier process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    served_model_name: str
    # unix:/path or host:port.
    address: Address
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # strict: a row's logits have the same bits in any batch; auto: strict on a CPU, fast on a GPU.
    numerics: Literal["auto", "strict", "fast"] = "auto"
    # Of the target on a GPU. flashinfer: of every pass, none of which then is a graph or runs ahead of the host; auto:
    # of long prompts' passes where it can be had, all others by Triton.
    attention_backend: Literal["auto", "triton", "flashinfer"] = "auto"
    # Threads of the forward pass; 0: one per core but one, which is left to the other services.
    threads: int = Field(default=0, ge=0, le=256)
    # Tokens of context; 0: what the checkpoint says.
    context_length: int = Field(default=0, ge=0)
    block_size: int = Field(default=16, ge=1, le=1024)
    # KV capacity in tokens; 0: planned from memory.
    max_total_tokens: int = Field(default=0, ge=0)
    # Share of a GPU's free memory for weights, cache and buffers.
    mem_fraction_static: float = Field(default=0.8, gt=0, le=1)
    # Launch every kernel by itself.
    disable_cuda_graph: bool = False
    # Launch no step before the host has read the one before.
    disable_overlap_schedule: bool = False
    max_running_requests: int = Field(default=64, ge=1, le=1024)
    max_queued_requests: int = Field(default=256, ge=1, le=65536)
    chunked_prefill_size: int = Field(default=512, ge=1, le=65536)
    disable_radix_cache: bool = False
    # Nodes of one tree at most, the root counted.
    speculative_num_draft_tokens: int = Field(default=8, ge=1, le=256)
    # Levels of a draft model's trees: as many as pay where it is 0, else exactly so many, whatever less would save.
    speculative_num_steps: int = Field(default=0, ge=0, le=64)
    # Children of one node in a draft model's tree.
    speculative_eagle_topk: int = Field(default=4, ge=1, le=64)
    # More running rows than this: true plain decode. 0: never.
    speculative_max_batch_size: int = Field(default=0, ge=0)
    drafters: tuple[DrafterEndpoint, ...] = ()
    # For benchmarks: tokens of a step that has a draft, on average, whatever was sampled. None: what was sampled.
    simulate_accept_length: float | None = Field(default=None, ge=1, le=256)
    # Milliseconds that a step waits for a draft before it goes on without.
    draft_timeout_ms: int = Field(default=200, ge=1, le=60_000)
    # Seconds that running sequences may go on after SIGTERM.
    drain_timeout_s: float = Field(default=20.0, ge=0)
    # http://host:port of an OpenTelemetry collector (OTLP over gRPC); None: no spans.
    otlp_traces_endpoint: str | None = None

    @field_validator("simulate_accept_length")
    @classmethod
    def _within_a_tree(cls, length: float | None, info: ValidationInfo) -> float | None:
        """A path through all of a tree's nodes gives as many tokens as it has nodes, the target's own among them."""
        nodes = info.data.get("speculative_num_draft_tokens")
        if length is not None and nodes is not None and length > nodes:
            raise ValueError(f"expected at most {nodes}, the nodes of a tree (--speculative-num-draft-tokens)")
        return length


def refuse_gpu_flags(values: Mapping[str, Any]) -> None:
    """``values``: of VerifierSettings' fields where models run on the CPU; None: not given.

    A flag without effect is a mistake that the user should know of: raises ConfigError.
    """
    for field in ("mem_fraction_static", "disable_cuda_graph", "disable_overlap_schedule", "attention_backend"):
        if values[field] not in (None, VerifierSettings.model_fields[field].default):
            raise ConfigError(
                f"--{field.replace('_', '-')} has an effect on a GPU only, and models run on the CPU here"
            )
    if values["numerics"] == "fast":
        raise ConfigError(
            "--numerics fast has an effect on a GPU only: on a CPU no kernels are faster than strict ones"
        )
