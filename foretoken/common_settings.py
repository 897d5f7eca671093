"""Declare the settings that several services share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from foretoken.address import Address
from foretoken.config import Flag, Settings

# Where a verifier or a drafter listens.
ListenAddress = Annotated[
    Address, Field(description="Where to listen: unix:/path or host:port."), Flag(metavar="ADDRESS")
]


class LinkSettings(Settings):
    """Settings of every service that calls others, or is called, over TCP."""

    link_token_file: Annotated[Path | None, Flag(metavar="PATH", env="FORETOKEN_LINK_TOKEN_FILE", unset="none")] = (
        Field(default=None, description="File with the token that services show each other over TCP.")
    )
    link_certfile: Annotated[Path | None, Flag(metavar="PATH", unset="no TLS")] = Field(
        default=None, description="Certificate chain (PEM) that this service shows its peers over TCP."
    )
    link_keyfile: Annotated[Path | None, Flag(metavar="PATH", unset="no TLS")] = Field(
        default=None, description="Private key (PEM) of --link-certfile."
    )
    link_ca: Annotated[Path | None, Flag(metavar="PATH", unset="no TLS")] = Field(
        default=None, description="Certificate (PEM) of the authority that signs the certificates of all peers."
    )

    @model_validator(mode="after")
    def _certificates_are_complete(self) -> Self:
        given = [self.link_certfile, self.link_keyfile, self.link_ca]
        if any(given) and not all(given):
            raise ValueError("--link-certfile, --link-keyfile and --link-ca belong together: give all three")
        return self


class ListenerSettings(LinkSettings):
    """Settings of verifiers and drafters: where they listen for their peers."""

    address: ListenAddress
    insecure_links: bool = Field(
        default=False,
        description="Listen for other machines without a token or certificates. Operators' calls stay refused.",
    )


class TracingSettings(Settings):
    """Settings of every service that makes spans."""

    otlp_traces_endpoint: Annotated[
        str | None, Flag(metavar="URL", env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", unset="no spans")
    ] = Field(
        default=None,
        description="Send spans to this OpenTelemetry collector (OTLP over gRPC): http://host:4317, or unix:/path, "
        "where spans are dropped while there is no such socket.",
    )


class ServedModelSettings(LinkSettings, TracingSettings):
    """Settings of gateways and verifiers."""

    model: Annotated[Path, Flag("MODEL")] = Field(description="Folder or hub id of the checkpoint.")
    served_model_names: Annotated[
        tuple[str, ...],
        Flag(
            "--served-model-name",
            metavar="NAME[,NAME]",
            unset="the folder's name, or the hub id",
            one_or_many=True,
        ),
    ] = Field(
        min_length=1,
        description="Names of the model in requests; may be given several times. An answer has the name that its "
        "request used. Metrics, and answers to requests that name no model, use the first name.",
    )
    drain_timeout_s: Annotated[float, Flag("--drain-timeout")] = Field(
        default=20.0,
        ge=0,
        description="Seconds that running streams have to finish after SIGTERM; serve takes it with --executor ray.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, values: Any) -> Any:
        """Accept ``served_model_name`` in place of a list of one name."""
        if isinstance(values, dict) and "served_model_name" in values:
            values = dict(values)
            values["served_model_names"] = values.pop("served_model_name")
        return values

    @field_validator("served_model_names", mode="before")
    @classmethod
    def _separate(cls, names: Any) -> Any:
        """Return the names in comma-separated texts, each once."""
        texts = (names,) if isinstance(names, str) else names
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise ValueError("expected text")
        return tuple(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))

    @property
    def served_model_name(self) -> str:
        """The first of the names."""
        return self.served_model_names[0]


class ComputeSettings(Settings):
    """Settings of verifiers and drafters: where and how models run."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of models; auto: an NVIDIA GPU if there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights and KV cache; auto: float32 on a CPU; on a GPU bfloat16, or float16 if the "
        "checkpoint is.",
    )
    disable_cuda_graph: bool = Field(default=False, description="On a GPU, launch each kernel separately.")
