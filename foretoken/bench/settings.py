"""Declare the settings of ``foretoken bench``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from foretoken.bench.measures import Bounds
from foretoken.config import AUTO, Flag, Settings

# Rounds of a comparison.
NUM_PAIRS = 5
_BOUNDS = ("ttft", "tpot", "e2e")


def _split(value: Any) -> tuple[str, ...]:
    """Return the values of a repeated flag; each may be several with commas between them."""
    items = (value,) if isinstance(value, str) else value
    return tuple(
        word.strip() for item in items for word in (item.split(",") if isinstance(item, str) else (str(item),))
    )


def _above_zero(value: tuple[float, ...]) -> tuple[float, ...]:
    """Return ``value`` unchanged. Raises ValueError for a number that is not finite and above 0."""
    if any(not (0 < item < math.inf) for item in value):
        raise ValueError("expected numbers above 0")
    return value


# Each given value may be several, with commas between them.
SPLIT = BeforeValidator(_split)
ABOVE_ZERO = AfterValidator(_above_zero)


class LoadSettings(Settings):
    """What requests of a load look like, and who sends them."""

    endpoint: Literal["completions", "chat"] = Field(
        default="completions", description="Where requests go: /v1/completions or /v1/chat/completions."
    )
    dataset_name: Literal["random", "file", "sharegpt", "speed-bench"] = Field(
        default="random", description="What to send: random words, or the prompts of a file in this layout."
    )
    dataset_path: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="File of prompts."
    )
    input_len: int = Field(default=256, ge=1, description="Tokens of a random prompt, without a shared prefix.")
    output_len: Annotated[int | None, Flag(metavar="INTEGER", unset="as the file says, else 128")] = Field(
        default=None, ge=1, description="Most tokens of an output."
    )
    range_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Lengths of random prompts and their outputs are from this share of the above up to it.",
    )
    prefix_len: int = Field(default=0, ge=0, description="Tokens of a prefix that random prompts share.")
    num_prefixes: int = Field(default=1, ge=1, description="Different shared prefixes.")
    tokenizer: Annotated[Path | None, Flag(metavar="PATH", unset="a trial request shows how long words are")] = Field(
        default=None, description="tokenizer.json, or a folder with it: random prompts have exact lengths."
    )
    seed: int = Field(default=0, ge=0, description="Seed of prompts and arrivals.")
    temperature: float = Field(default=0.0, ge=0, description="0: greedy.")
    clients: Annotated[int, AUTO] = Field(
        default=0, ge=0, le=64, description="Client processes; auto: by the load, at most half of the cores."
    )
    read_timeout_s: Annotated[float, Flag("--read-timeout")] = Field(
        default=300.0, gt=0, description="Seconds without a byte after which a request has failed."
    )

    @model_validator(mode="after")
    def _has_its_prompts(self) -> Self:
        if (self.dataset_name == "random") != (self.dataset_path is None):
            raise ValueError("--dataset-path belongs to --dataset-name file, sharegpt or speed-bench")
        return self


class BenchSettings(LoadSettings):
    """What to send to which server, how much at once, and where to write what was found."""

    url: Annotated[str, Flag(env="FORETOKEN_URL")] = Field(
        default="http://127.0.0.1:8000", description="URL of the server, with or without /v1."
    )
    api_key: Annotated[SecretStr | None, Flag(metavar="KEY", env="FORETOKEN_API_KEY", unset="none", secret=True)] = (
        Field(default=None, description="API key to send.")
    )
    model: Annotated[str | None, Flag("--model", metavar="NAME", unset="the first that the server lists")] = Field(
        default=None, description="Name of the model in requests."
    )
    compare_url: Annotated[str | None, Flag(metavar="URL", unset="no comparison")] = Field(
        default=None,
        description="URL of a second server, which gets the same load in turn with the first. It may be the first "
        "again, with another --compare-extra-request-body.",
    )
    compare_api_key: Annotated[
        SecretStr | None,
        Flag(metavar="KEY", env="FORETOKEN_COMPARE_API_KEY", unset="the first server's", secret=True),
    ] = Field(default=None, description="API key of the second server.")
    compare_model: Annotated[str | None, Flag(metavar="NAME", unset="the first that it lists")] = Field(
        default=None, description="Name of the model at the second server."
    )
    max_concurrency: Annotated[
        tuple[int, ...], SPLIT, ABOVE_ZERO, Flag(metavar="N,N,...", unset="1 without --request-rate", one_or_many=True)
    ] = Field(default=(), description="Requests that run at once; one measurement for each number.")
    request_rate: Annotated[
        tuple[float, ...], SPLIT, ABOVE_ZERO, Flag(metavar="R,R,...", unset="none", one_or_many=True)
    ] = Field(
        default=(), description="Requests a second that arrive at random (Poisson); one measurement for each number."
    )
    num_prompts: Annotated[int, AUTO] = Field(
        default=0,
        ge=0,
        description="Prompts of one measurement; auto: as many as --duration takes; without it, 4 for each that runs "
        "at once, or as many as a rate sends in 20 seconds, and at least 32.",
    )
    duration_s: Annotated[float | None, Flag("--duration", metavar="SECONDS", unset="none")] = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds of one measurement in which requests start; it ends with the last of them. With "
        "--num-prompts, whichever limit comes first ends it.",
    )
    num_rounds: Annotated[int, AUTO] = Field(
        default=0, ge=0, description="Times that each measurement is made; auto: 5 in a comparison, else 1."
    )
    warmup_requests: int = Field(default=4, ge=0, description="Requests to each server before all measurements.")
    disable_ignore_eos: bool = Field(
        default=False, description="Outputs may end before --output-len. Always so if the server refuses ignore_eos."
    )
    salt_requests: bool = Field(
        default=False,
        description="Give each request a cache_salt of its own: a server that knows the field reuses no prefix and no "
        "history of n-grams.",
    )
    extra_request_body: Annotated[dict[str, Any], Flag(metavar="JSON", unset="none")] = Field(
        default_factory=dict, description="JSON object of more request fields."
    )
    compare_extra_request_body: Annotated[dict[str, Any] | None, Flag(metavar="JSON", unset="the first server's")] = (
        Field(default=None, description="JSON object of more request fields for the second server.")
    )
    goodput: Annotated[
        tuple[str, ...], SPLIT, Flag(metavar="ttft:MS,tpot:MS,e2e:MS", unset="none", one_or_many=True)
    ] = Field(default=(), description="Bounds in milliseconds that a request must meet to count as good.")
    allow_failures: bool = Field(default=False, description="Exit with 0 even if requests failed.")
    output_file: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="JSON file to write."
    )
    picture: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="SVG file to write: throughput against the speed of one user."
    )

    @field_validator("extra_request_body", "compare_extra_request_body", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ValueError(f"expected a JSON object: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object")
        return found

    @field_validator("goodput")
    @classmethod
    def _are_bounds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for item in value:
            name, _, limit = item.partition(":")
            if name not in _BOUNDS or not limit.replace(".", "", 1).isdecimal():
                raise ValueError(f"expected ttft:MS, tpot:MS or e2e:MS, got {item!r}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.compare_url is None and (self.compare_extra_request_body is not None or self.compare_model is not None):
            raise ValueError("--compare-model and --compare-extra-request-body need --compare-url")
        return self

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of a good request; None without any."""
        if not self.goodput:
            return None
        limits = dict(item.split(":") for item in self.goodput)
        return Bounds(**{f"{name}_s": float(limit) / 1e3 for name, limit in limits.items()})

    @property
    def rounds(self) -> int:
        """How often each measurement is made."""
        return self.num_rounds or (NUM_PAIRS if self.compare_url is not None else 1)
