"""Declare the verifier's settings."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from foretoken.address import Address
from foretoken.common_settings import ComputeSettings, ListenerSettings, ServedModelSettings
from foretoken.config import AUTO, Flag, Settings, flag_of
from foretoken.drafter_names import DrafterName
from foretoken.errors import ConfigError
from foretoken.limits import MAX_DRAFT_TOKENS

Transport = Literal["auto", "shared-memory", "grpc"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
# Nodes of a draft tree where nothing says more.
DEFAULT_NODES = 8
# What --kv-events imports: the extra kv-events.
_KV_EVENT_MODULES = ("zmq", "msgspec")
_ZMQ_TCP = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s:/@]+):([0-9]{1,5})")


def check_zmq_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` unchanged. Raises ValueError if ZeroMQ could not listen there."""
    if endpoint.startswith("ipc:///"):
        return endpoint
    match = _ZMQ_TCP.fullmatch(endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError("expected tcp://ADDRESS:PORT, tcp://*:PORT or ipc:///path")
    return endpoint


ZmqEndpoint = Annotated[str, AfterValidator(check_zmq_endpoint)]


class DrafterEndpoint(Settings):
    """One drafter of the verifier's configuration. It may be down at any time."""

    name: DrafterName
    # "auto" uses the shared-memory arena over a Unix socket, which means the same host.
    address: Address
    transport: Transport = "auto"


class KvEventSettings(Settings):
    """Settings of the stream of KV events."""

    kv_events: Annotated[ZmqEndpoint | None, Flag(metavar="ENDPOINT", unset="none")] = Field(
        default=None,
        description="Publish which blocks the prefix cache holds, as vLLM does, on this ZeroMQ endpoint: tcp://*:5557. "
        "Whoever reaches it reads the token ids of all prompts and outputs.",
    )
    kv_events_replay: Annotated[ZmqEndpoint | None, Flag(metavar="ENDPOINT", unset="none")] = Field(
        default=None, description="Send published events again to who asks at this endpoint: tcp://*:5558."
    )
    kv_events_topic: Annotated[str, Flag(metavar="TOPIC", unset="kv@HOSTNAME@MODEL")] = Field(
        default="", description="Topic of published events; llm-d's router expects kv@POD@MODEL."
    )

    @model_validator(mode="after")
    def _replays_what_is_published(self) -> Self:
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ValueError("--kv-events-replay and --kv-events-topic need --kv-events")
        if self.kv_events is not None and self.kv_events == self.kv_events_replay:
            raise ValueError("--kv-events and --kv-events-replay must differ")
        return self


class VerifierSettings(ServedModelSettings, ComputeSettings, ListenerSettings, KvEventSettings):
    """Settings of one verifier process."""

    # strict: a row's logits have the same bits in any batch.
    numerics: Literal["auto", "strict", "fast"] = Field(
        default="auto",
        description="strict: the text never depends on drafts or on other requests; fast: on a GPU near-ties between "
        "tokens may fall the other way. auto: strict on a CPU, fast on a GPU.",
    )
    # flashinfer: every pass uses it. Then no pass is a captured graph, and none overlaps with the
    # host.
    attention_backend: Literal["auto", "triton", "flashinfer"] = Field(
        default="auto",
        description="The target's attention on a GPU; flashinfer plans each step on the host. auto: FlashInfer for "
        "prompts if it is installed and --chunked-prefill-size is 2048 or more, else Triton.",
    )
    threads: int = Field(default=0, ge=0, le=256, description="Threads of the forward pass; 0: all cores but one.")
    context_length: int = Field(default=0, ge=0, description="Tokens of context; 0: as the checkpoint says.")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens of one KV block.")
    max_total_tokens: int = Field(default=0, ge=0, description="KV cache in tokens; 0: planned from memory.")
    mem_fraction_static: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the GPU's free memory for weights, cache and buffers; drafters need part of the rest.",
    )
    disable_overlap_schedule: bool = Field(
        default=False, description="On a GPU, launch a step only after the host has read the last one."
    )
    # verifier_svc.model.sizes puts a number in place of 0.
    max_running_requests: Annotated[int, AUTO] = Field(
        default=0,
        ge=0,
        le=1024,
        description="Sequences that run at once. auto: 64 on a CPU; on a GPU up to 512, by its memory.",
    )
    max_queued_requests: int = Field(
        default=2048, ge=1, le=65536, description="Requests that may wait; one more gets 429."
    )
    chunked_prefill_size: Annotated[int, AUTO] = Field(
        default=0,
        ge=0,
        le=65536,
        description="Most prompt tokens of one step; --max-step-ms allows fewer. auto: 512 on a CPU, 2048 on a GPU.",
    )
    max_step_ms: int = Field(
        default=60,
        ge=0,
        le=60_000,
        description="Milliseconds that a step should take with its prompts while others decode; as many prompt tokens "
        "ride in it as are measured to fit. 0: no limit.",
    )
    disable_radix_cache: bool = Field(default=False, description="Use no prefix cache: compute every prompt in full.")
    # verifier_svc.model.sizes puts a number in place of 0.
    speculative_num_draft_tokens: Annotated[int, AUTO] = Field(
        default=0,
        ge=0,
        le=MAX_DRAFT_TOKENS.high + 1,
        description="Most nodes of one draft tree, including the root. auto: 32 on a GPU, but 8 if "
        "--speculative-num-steps is given; 8 on a CPU.",
    )
    speculative_num_steps: int = Field(
        default=0, ge=0, le=64, description="Exact levels of a draft model's trees; 0: as many as pay off."
    )
    speculative_eagle_topk: int = Field(
        default=4, ge=1, le=64, description="Most children of one node in a draft model's trees."
    )
    speculative_max_batch_size: int = Field(
        default=0, ge=0, description="Largest batch to draft for; larger ones decode plainly. 0: no limit."
    )
    drafters: Annotated[
        tuple[DrafterEndpoint, ...],
        Flag("--drafter", metavar="name=NAME,address=ADDRESS[,transport=auto|shared-memory|grpc]", unset="none"),
    ] = Field(
        default=(),
        description="A drafter to attach to; or, to run it in this process, name=NAME,algorithm=ALGORITHM"
        "[,model=MODEL]. May be given several times.",
    )
    speculative_controller_log: Annotated[str, Flag(metavar="FILE", unset="none")] = Field(
        default="",
        description="On a GPU only: log what decides the shapes of drafts to FILE.NAME for each drafter with a model; "
        "benchmarks/replay_controller.py decides the same from it.",
    )
    simulate_accept_length: Annotated[float | None, Flag(metavar="TOKENS", unset="what the model accepts")] = Field(
        default=None,
        ge=1,
        le=256,
        description="For benchmarks only: a step with a draft emits this many tokens on average, without meaning.",
    )
    draft_timeout_ms: int = Field(
        default=200,
        ge=1,
        le=60_000,
        description="Milliseconds that a step waits for a draft at least; otherwise four times what drafts have cost.",
    )

    def check_kv_events(self) -> None:
        """Raise ConfigError if --kv-events lacks a cache or the packages that it needs."""
        if self.kv_events is None:
            return
        if self.disable_radix_cache:
            raise ConfigError("--kv-events publishes the prefix cache, which --disable-radix-cache switches off")
        if not all(find_spec(name) for name in _KV_EVENT_MODULES):
            raise ConfigError("--kv-events needs more packages: pip install 'foretoken[kv-events]'")

    @field_validator("simulate_accept_length")
    @classmethod
    def _within_a_tree(cls, length: float | None, info: ValidationInfo) -> float | None:
        """Raise ValueError if ``length`` exceeds the nodes of a tree, its longest possible path."""
        nodes = info.data.get("speculative_num_draft_tokens")
        if nodes == 0:
            nodes = DEFAULT_NODES
        if length is not None and nodes is not None and length > nodes:
            raise ValueError(f"expected at most {nodes}, the nodes of a tree (--speculative-num-draft-tokens)")
        return length


def refuse_gpu_flags(settings: VerifierSettings) -> None:
    """Raise ConfigError if a setting is set that has no effect on a CPU."""
    for name in (
        "mem_fraction_static",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "attention_backend",
        "speculative_controller_log",
    ):
        if getattr(settings, name) != VerifierSettings.model_fields[name].default:
            flag = flag_of(VerifierSettings, name)
            raise ConfigError(f"{flag} has an effect on a GPU only, and models run on the CPU here")
    if settings.numerics == "fast":
        raise ConfigError(
            "--numerics fast has an effect on a GPU only: on a CPU no kernels are faster than strict ones"
        )
