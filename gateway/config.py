"""The gateway's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from foretoken.address import Address
from foretoken.common_settings import ServedModelSettings
from foretoken.config import Flag
from foretoken.errors import ConfigError
from foretoken.limits import MAX_ATTEMPTS

MIN_KEY_CHARS = 16


class GatewaySettings(ServedModelSettings):
    """Settings of one gateway process."""

    verifiers: Annotated[tuple[Address, ...], Flag("--verifier", metavar="ADDRESS")] = Field(
        min_length=1, description="Where a verifier listens: unix:/path or host:port; may be given several times."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the OpenAI-compatible REST API.")
    grpc_port: int = Field(default=50051, ge=1, le=65535, description="Port of the public gRPC API.")
    chat_template: Annotated[Path | None, Flag(metavar="FILE", unset="the tokenizer's")] = Field(
        default=None, description="Jinja file that replaces the tokenizer's chat template."
    )
    request_timeout_s: Annotated[float, Flag("--request-timeout")] = Field(
        default=600.0, gt=0, le=86_400, description="Seconds that a request may take."
    )
    resume_attempts: int = Field(
        default=3,
        ge=0,
        le=MAX_ATTEMPTS,
        description="Times that a stream may lose its verifier and go on at another or its successor.",
    )
    verifier_wait_s: Annotated[float, Flag("--verifier-wait")] = Field(
        default=30.0, ge=0, le=86_400, description="Seconds that a new request waits while no verifier is up; then 503."
    )
    # metrics.speculative_decoding.
    speculative_metrics: Literal["none", "summary", "detailed"] = Field(
        default="summary", description="Figures of speculation in responses."
    )
    # All protocols together.
    max_concurrent_requests: int = Field(
        default=512,
        ge=1,
        le=65536,
        description="Requests of one gateway process that run or wait; one more gets 429.",
    )
    client_timeout_s: Annotated[float, Flag("--client-timeout")] = Field(
        default=90.0,
        gt=0,
        le=86_400,
        description="Seconds that a client may read nothing of what waits for it; then it is cut.",
    )
    gateway_workers: int = Field(default=1, ge=1, le=64, description="Gateway processes that share the ports.")
    worker_socket: Annotated[Path | None, Flag(hidden=True)] = Field(
        default=None, description="Where a worker process hands its counts to its parent."
    )
    liveness_socket: Annotated[Path | None, Flag(hidden=True)] = Field(
        default=None, description="Where its supervisor asks when the event loop last turned."
    )
    vllm_metric_names: bool = Field(
        default=False, description="Metrics that vLLM has too appear under its names as well."
    )
    admin_api_key_file: Annotated[
        Path | None, Flag(metavar="PATH", env="FORETOKEN_ADMIN_API_KEY_FILE", unset="none: no such endpoints")
    ] = Field(default=None, description="Key of the operator's endpoints, /v1/corpora and /v1/drafters.")

    @field_validator("verifiers")
    @classmethod
    def _each_once(cls, verifiers: tuple[str, ...]) -> tuple[str, ...]:
        for address in verifiers:
            if verifiers.count(address) > 1:
                raise ValueError(f"{address} is given twice")
        return verifiers

    def admin_key(self) -> str | None:
        """The operator's key. Raises ConfigError for a file that cannot be read, or whose key could be guessed."""
        if self.admin_api_key_file is None:
            return None
        try:
            key = self.admin_api_key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--admin-api-key-file: cannot read {self.admin_api_key_file}: {error}") from None
        if len(key) < MIN_KEY_CHARS or not key.isprintable():
            raise ConfigError(f"--admin-api-key-file: the key must have at least {MIN_KEY_CHARS} printable characters")
        return key


def read_chat_template(path: Path) -> str:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None
