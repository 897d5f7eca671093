"""Declare the settings that several services share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from foretoken.address import Address
from foretoken.config import Flag, Settings

# Where a verifier or a drafter listens.
ListenAddress = Annotated[
    Address, Field(description="Where to listen: unix:/path or host:port."), Flag(metavar="ADDRESS")
]


class ServedModelSettings(Settings):
    """Settings of gateways and verifiers."""

    model: Annotated[Path, Flag("MODEL")] = Field(description="Folder or hub id of the checkpoint.")
    served_model_name: Annotated[str, Flag(unset="the folder's name, or the hub id")] = Field(
        description="Model name in requests and answers."
    )
    drain_timeout_s: Annotated[float, Flag("--drain-timeout")] = Field(
        default=20.0, ge=0, description="Seconds that running streams have to finish after SIGTERM."
    )
    otlp_traces_endpoint: Annotated[
        str | None, Flag(metavar="URL", env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", unset="no spans")
    ] = Field(
        default=None, description="Send spans to this OpenTelemetry collector: http://host:4317 (OTLP over gRPC)."
    )


class ComputeSettings(Settings):
    """Settings of verifiers and drafters: where and how models run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of models; auto: an NVIDIA GPU if there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."
    )
    disable_cuda_graph: bool = Field(default=False, description="On a GPU, launch each kernel separately.")
