"""Settings convert to flags and back; mistakes get readable messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafter_svc.config import DrafterSettings
from drafter_svc.ngram.settings import NgramSettings
from foretoken.config import build, flag_of, parse_pairs, to_flags
from foretoken.errors import ConfigError
from gateway.config import GatewaySettings
from verifier_svc.config import DrafterEndpoint, VerifierSettings

VERIFIER: dict[str, Any] = {"model": "/m", "served_model_name": "m", "address": "unix:/v"}


def test_flags_are_those_off_their_default_after_the_argument() -> None:
    settings = VerifierSettings(
        model=Path("/m"),
        served_model_name="m",
        address="unix:/v",
        threads=2,
        disable_radix_cache=True,
        drafters=(DrafterEndpoint(name="a", address="unix:/a"), DrafterEndpoint(name="b", address="h:1")),
    )
    assert to_flags(settings) == [
        "/m",
        *("--address", "unix:/v", "--served-model-name", "m", "--threads", "2", "--disable-radix-cache"),
        *("--drafter", "name=a,address=unix:/a,transport=auto", "--drafter", "name=b,address=h:1,transport=auto"),
    ]


def test_flags_of_nested_settings_have_their_prefix() -> None:
    settings = DrafterSettings(name="ngram", address="unix:/d", ngram=NgramSettings(capacity=4096, order="frequency"))
    assert to_flags(settings) == [
        *("--name", "ngram", "--address", "unix:/d"),
        *("--speculative-ngram-capacity", "4096", "--speculative-ngram-order", "frequency"),
    ]


@pytest.mark.parametrize("given", ["m,n", ["m", "n"], ["m, n", "m"]])
def test_a_model_has_several_names(given: str | list[str]) -> None:
    settings = build(GatewaySettings, {"model": "/m", "served_model_name": given, "verifiers": ["unix:/v"]})
    assert (settings.served_model_names, settings.served_model_name) == (("m", "n"), "m")
    assert to_flags(settings)[1:5] == ["--served-model-name", "m", "--served-model-name", "n"]


def test_a_model_has_a_name() -> None:
    with pytest.raises(ConfigError, match=r"^--served-model-name: "):
        build(GatewaySettings, {"model": "/m", "served_model_name": " ,", "verifiers": ["unix:/v"]})


def test_a_unit_that_the_help_states_is_not_in_the_flag() -> None:
    settings = GatewaySettings(model=Path("/m"), served_model_name="m", verifiers=("unix:/v",), request_timeout_s=5)
    assert to_flags(settings)[-2:] == ["--request-timeout", "5.0"]
    assert flag_of(VerifierSettings, "draft_timeout_ms") == "--draft-timeout-ms"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threads": -1}, "--threads: expected at least 0, got -1"),
        ({"dtype": "int8"}, "--dtype: expected auto, float32, bfloat16 or float16, got 'int8'"),
        ({"served_model_name": None}, "--served-model-name: expected text"),
        ({"colour": "red"}, "--colour: there is no such key"),
        (
            {"drafters": [{"name": "a", "address": "x:1", "transport": "pigeon"}]},
            "--drafter transport: expected auto, shared-memory or grpc, got 'pigeon'",
        ),
        ({"drafters": [{"name": "a"}]}, "--drafter address: must be given"),
        (
            {"drafters": [{"name": "merge", "address": "x:1"}]},
            "--drafter name: merge means a choice of drafters, got 'merge'",
        ),
        (
            {"threads": 999, "block_size": 0},
            "--threads: expected at most 256, got 999; --block-size: expected at least 1, got 0",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(VerifierSettings, VERIFIER | values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ngram", "message"),
    [
        ({"order": "size"}, "--speculative-ngram-order: expected frequency or recency, got 'size'"),
        (
            {"min_match_window_size": 9, "max_match_window_size": 3},
            "--speculative-ngram-...: min_match_window_size must not exceed max_match_window_size",
        ),
    ],
)
def test_a_mistake_in_nested_settings(ngram: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(DrafterSettings, {"name": "n", "address": "x:1", "ngram": ngram})
    assert str(caught.value) == message


def test_a_verifier_given_twice_is_refused() -> None:
    values = {"model": Path("/m"), "served_model_name": "m", "verifiers": ["unix:/v", "unix:/w", "unix:/v"]}
    with pytest.raises(ConfigError) as caught:
        build(GatewaySettings, values)
    assert str(caught.value) == "--verifier: unix:/v is given twice"


def test_pairs() -> None:
    assert parse_pairs("name=a,address=unix:/x=y", "--drafter") == {"name": "a", "address": "unix:/x=y"}
    assert parse_pairs("name=a, algorithm=NGRAM", "--drafter") == {"name": "a", "algorithm": "NGRAM"}


@pytest.mark.parametrize("text", ["", "name", "=a", "name=a,name=b", "name=a,"])
def test_pairs_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--drafter: expected key=value"):
        parse_pairs(text, "--drafter")
