"""Declare the gateway's settings."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator

from foretoken.common_settings import ServedModelSettings
from foretoken.config import Flag
from foretoken.errors import ConfigError
from foretoken.limits import MAX_ATTEMPTS, MAX_BODY_BYTES
from foretoken.operator_key import read_operator_key
from gateway.access.certificates import CertificateFiles
from gateway.access.keyring import all_keys, given_keys
from gateway.chat import reasoning, tool_formats
from gateway.discovery.locations import Location
from gateway.routing.defaults import DEFAULT_LOAD_BOUND

# What --gateway-workers auto means.
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 4
# Instead of a list of hosts or origins.
ANY = "*"
MAX_KEY_CHARS = 512
_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def _names(value: Any) -> Any:
    """Return the names in comma-separated texts, in lower case."""
    texts: Iterable[str] = (value,) if isinstance(value, str) else value
    return tuple(name.strip().lower() for text in texts for name in text.split(",") if name.strip())


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class GatewaySettings(ServedModelSettings):
    """Settings of one gateway process."""

    verifiers: Annotated[tuple[Location, ...], Flag("--verifier", metavar="ADDRESS or SOURCE")] = Field(
        min_length=1,
        description="Address of a verifier, unix:/path or host:port, or where addresses are found: "
        "dns+srv://NAME (SRV records), dns://NAME:PORT (A and AAAA records) or file:/PATH (one a line). May be given "
        "several times.",
    )
    discovery_interval_s: Annotated[float, Flag("--discovery-interval")] = Field(
        default=2.0, ge=0.1, le=3600, description="Seconds between two looks at the DNS names and files of --verifier."
    )
    routing_load_bound: float = Field(
        default=DEFAULT_LOAD_BOUND,
        gt=1,
        le=100,
        description="Most load of a verifier that requests are sent to for their prefix, as a multiple of the mean; "
        "above it the next verifier of the prefix takes them.",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the OpenAI-compatible REST API.")
    grpc_port: int = Field(default=50051, ge=1, le=65535, description="Port of the public gRPC API.")
    chat_template: Annotated[Path | None, Flag(metavar="FILE", unset="the tokenizer's")] = Field(
        default=None, description="Jinja file that replaces the tokenizer's chat template."
    )
    generation_config: Literal["auto", "vllm", "none"] = Field(
        default="auto",
        description="Sampling defaults of requests that set none: auto: the checkpoint's generation_config.json; vllm, "
        "none: OpenAI's, which are vLLM's too (temperature 1, nothing else).",
    )
    strict_fields: bool = Field(
        default=False,
        description="Refuse unknown fields of requests with 400. Otherwise the header x-foretoken-ignored-fields names "
        "them.",
    )
    tool_call_parser: Annotated[str, Flag(metavar="auto, none or NAME")] = Field(
        default="auto",
        description="Form of the model's tool calls: hermes, llama3_json, mistral or pythonic; vLLM's and SGLang's "
        "names of these work too. auto: by the chat template; none: calls stay text.",
    )
    reasoning_parser: Annotated[str, Flag(metavar="auto, none or NAME")] = Field(
        default="auto",
        description="Form of the model's reasoning, which answers show as reasoning_content: qwen3, deepseek_r1 or "
        "mistral. auto: by the chat template; none: reasoning stays text.",
    )
    request_timeout_s: Annotated[float, Flag("--request-timeout")] = Field(
        default=600.0, gt=0, le=86_400, description="Seconds that a request may take."
    )
    resume_attempts: int = Field(
        default=3,
        ge=0,
        le=MAX_ATTEMPTS,
        description="Times that a stream may lose its verifier and resume on another or on the restarted one.",
    )
    verifier_wait_s: Annotated[float, Flag("--verifier-wait")] = Field(
        default=30.0, ge=0, le=86_400, description="Seconds that a new request waits for a verifier; then it gets 503."
    )
    # The answers' field metrics.speculative_decoding.
    speculative_metrics: Literal["none", "summary", "detailed"] = Field(
        default="summary", description="Figures about speculation in answers."
    )
    # Over all protocols.
    max_concurrent_requests: int = Field(
        default=4096,
        ge=1,
        le=65536,
        description="Requests that run or wait in one gateway process; one more gets 429.",
    )
    # Over all processes.
    max_body_bytes_in_flight: int = Field(
        default=8 * MAX_BODY_BYTES,
        ge=MAX_BODY_BYTES,
        le=2**40,
        description="Bytes of REST bodies and gRPC messages that are read or wait to run at once; a further body gets "
        "429. A process has at least 8 MiB.",
    )
    allowed_hosts: Annotated[Names, Flag(metavar="HOST[,HOST]", unset="none")] = Field(
        default=(),
        description="This server's names in Host headers, without ports, besides localhost, 127.0.0.1 and [::1]; *: "
        "any. Checked if given, or if the server listens on loopback.",
    )
    allowed_origins: Annotated[Names, Flag(metavar="ORIGIN[,ORIGIN]", unset="none")] = Field(
        default=(),
        description="Origins of web pages that may call, such as https://chat.example.com, besides the server's own; "
        "*: any.",
    )
    client_timeout_s: Annotated[float, Flag("--client-timeout")] = Field(
        default=90.0,
        gt=0,
        le=86_400,
        description="Seconds that a client may read nothing while data waits for it; then it is disconnected.",
    )
    gateway_workers: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1, le=64)], Flag(metavar="auto or 1 to 64")
    ] = Field(
        default="auto",
        description="Gateway processes that share the ports; auto: one for each four cores that foretoken may use, at "
        "least 1 and at most 4.",
    )
    worker_socket: Annotated[Path | None, Flag(hidden=True)] = Field(
        default=None, description="Socket on which a worker process serves its counts to its parent."
    )
    liveness_socket: Annotated[Path | None, Flag(hidden=True)] = Field(
        default=None, description="Socket on which the supervisor asks when the event loop last turned."
    )
    disable_playground: bool = Field(default=False, description="Serve no page at /.")
    vllm_metric_names: bool = Field(
        default=False, description="Also show all metrics that vLLM has under vLLM's names."
    )
    admin_api_key_file: Annotated[
        Path | None, Flag(metavar="PATH", env="FORETOKEN_ADMIN_API_KEY_FILE", unset="none: no such endpoints")
    ] = Field(
        default=None,
        description="File with the key of the operator's endpoints /v1/corpora, /v1/drafters and /v1/activity.",
    )
    api_keys: Annotated[
        tuple[SecretStr, ...],
        Flag("--api-key", metavar="KEY", env="FORETOKEN_API_KEY", unset="none: clients need no key", secret=True),
    ] = Field(
        default=(),
        description="A key that clients need; may be given several times (in the environment: with spaces between). "
        "All users of the machine can read a command line: prefer the environment or --api-key-file.",
    )
    api_key_file: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None,
        description="File of hashed keys with names and limits, as foretoken key writes it. Read again after SIGHUP.",
    )
    insecure: bool = Field(
        default=False, description="Let other machines use the server without a key, if --host listens for them."
    )
    ssl_certfile: Annotated[Path | None, Flag(metavar="FILE", unset="none: no TLS")] = Field(
        default=None,
        description="Certificate chain (PEM) for REST and gRPC. Read again after SIGHUP.",
    )
    ssl_keyfile: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="Private key (PEM, without a password) of --ssl-certfile. Read again after SIGHUP."
    )
    ssl_ca_certs: Annotated[Path | None, Flag(metavar="FILE", unset="none: clients need no certificate")] = Field(
        default=None, description="Roots (PEM) that clients' certificates must lead to. Read again after SIGHUP."
    )
    probe_key: Annotated[SecretStr | None, Flag(hidden=True, env="FORETOKEN_PROBE_KEY", secret=True)] = Field(
        default=None, description="The supervisor's key, which shows it the details of /ready."
    )

    @field_validator("verifiers")
    @classmethod
    def _each_once(cls, verifiers: tuple[str, ...]) -> tuple[str, ...]:
        for address in verifiers:
            if verifiers.count(address) > 1:
                raise ValueError(f"{address} is given twice")
        return verifiers

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _is_parser(cls, name: str, info: ValidationInfo) -> str:
        names = tool_formats.NAMES if info.field_name == "tool_call_parser" else reasoning.NAMES
        if name not in ("auto", "none", *names):
            raise ValueError(f"expected one of auto, none, {', '.join(names)}")
        return name

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if host != ANY and not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is not a host without a port: name, 10.0.0.1, [::1] or *")
        return hosts

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin: https://name, http://name:port or *")
        return origins

    @field_validator("api_keys")
    @classmethod
    def _are_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not (0 < len(text) <= MAX_KEY_CHARS and text.isascii() and text.isprintable() and " " not in text):
                raise ValueError(f"a key must have 1 to {MAX_KEY_CHARS} printable ASCII characters without spaces")
        return keys

    @model_validator(mode="after")
    def _has_whole_certificate(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile must be given together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-certfile")
        return self

    @property
    def secrets(self) -> list[str]:
        """The keys that were given without a file."""
        return [key.get_secret_value() for key in self.api_keys]

    @property
    def needs_key(self) -> bool:
        """Return whether clients need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def is_reloadable(self) -> bool:
        """Return whether SIGHUP makes the gateway read files again."""
        return self.api_key_file is not None or self.ssl_certfile is not None

    @property
    def certificate_files(self) -> CertificateFiles | None:
        """The files for TLS; None for plain text."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return CertificateFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def check_access(self) -> None:
        """Raise ConfigError for an unusable file of keys or certificates, or an exposed server."""
        self.admin_key()
        all_keys(given_keys(self.secrets), self.api_key_file)
        if self.certificate_files is not None:
            self.certificate_files.context()
        is_protected = self.needs_key or self.ssl_ca_certs is not None or self.insecure
        if not is_protected and not all(address.is_loopback for address in _addresses(self.host)):
            raise ConfigError(
                f"--host {self.host}: other machines could use this server without a key; give --api-key-file or "
                "--api-key (foretoken key makes one), or --insecure to let them"
            )

    @property
    def num_workers(self) -> int:
        """Gateway processes, with auto decided."""
        if self.gateway_workers == "auto":
            return default_workers(len(os.sched_getaffinity(0)))
        return self.gateway_workers

    @property
    def max_body_bytes_per_process(self) -> int:
        """One process's share of the budget for bodies: at least one whole body."""
        return max(self.max_body_bytes_in_flight // self.num_workers, MAX_BODY_BYTES)

    def admin_key(self) -> str | None:
        """Read the operator's key. Raises ConfigError if it is unreadable or too easy to guess."""
        return None if self.admin_api_key_file is None else read_operator_key(self.admin_api_key_file)


def is_loopback(host: str) -> bool:
    """Return whether all addresses of ``host`` are on loopback."""
    addresses = _addresses(host)
    return bool(addresses) and all(address.is_loopback for address in addresses)


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of ``host``; none if it cannot be resolved, which binding reports."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(address[0]) for *_, address in found]


def default_workers(num_cores: int) -> int:
    """Return how many gateway processes ``--gateway-workers auto`` starts.

    One carries 20,000 tokens a second. The other cores are for the verifier, the drafters and the
    machine's other work.
    """
    return max(1, min(num_cores // CORES_PER_WORKER, MAX_DEFAULT_WORKERS))


def read_chat_template(path: Path) -> str:
    """Read a chat template. Raises ConfigError for an unreadable file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None
