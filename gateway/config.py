"""The gateway's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from foretoken.address import Address
from foretoken.errors import ConfigError
from foretoken.limits import MAX_ATTEMPTS

MIN_KEY_CHARS = 16


class GatewaySettings(BaseModel):
    """Settings of one gateway process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Folder that holds the tokenizer.
    model: Path
    served_model_name: str
    # unix:/path or host:port, each.
    verifiers: tuple[Address, ...] = Field(min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=50051, ge=1, le=65535)
    # Jinja file that replaces the tokenizer's own chat template.
    chat_template: Path | None = None
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    # Resumes of one output that verifiers may accept before a further loss is an error.
    resume_attempts: int = Field(default=3, ge=0, le=MAX_ATTEMPTS)
    # Seconds that a new request waits while no verifier is up, before it gets 503.
    verifier_wait_s: float = Field(default=30.0, ge=0, le=86_400)
    # metrics.speculative_decoding in responses.
    speculative_metrics: Literal["none", "summary", "detailed"] = "summary"
    # Requests that run or wait at once in one process, all protocols together.
    max_concurrent_requests: int = Field(default=512, ge=1, le=65536)
    # Seconds that a client may take nothing of what waits for it, before its connection is cut.
    client_timeout_s: float = Field(default=90.0, gt=0, le=86_400)
    # Seconds that running streams may go on after SIGTERM.
    drain_timeout_s: float = Field(default=20.0, ge=0)
    # Processes that share the ports.
    gateway_workers: int = Field(default=1, ge=1, le=64)
    # Where a worker process hands its counts to its parent; None: this process is no worker.
    worker_socket: Path | None = None
    # Where its supervisor asks when the event loop last turned; None: nobody asks.
    liveness_socket: Path | None = None
    # Show metrics that vLLM has too under its names as well.
    vllm_metric_names: bool = False
    # File that holds the key of the operator's endpoints; None: there are no such endpoints.
    admin_api_key_file: Path | None = None
    # http://host:port of an OpenTelemetry collector (OTLP over gRPC); None: no spans.
    otlp_traces_endpoint: str | None = None

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
