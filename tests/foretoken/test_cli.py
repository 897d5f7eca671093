"""The command line: help, usage, refused words, and few imports."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from foretoken.cli import app
from tests.support.command_line import foretoken, free_port, loaded_by


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("serve", "m", "--numerics", "x"), "--numerics"),
        (("gateway", "m", "--log-level", "x"), "--log-level"),
        (("drafters", "attach", "a", "b", "--transport", "x"), "--transport"),
    ],
)
def test_a_choice_that_is_none_is_refused_in_plain_words(words: tuple[str, ...], flag: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}': 'x' is not one of '" in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve",), "Missing argument 'MODEL'"),
        (("serve", ".", "--no-such-flag", "2"), "No such option '--no-such-flag'"),
        (("verifier", ".", "--tp-size", "1"), "No such option '--tp-size'"),
        (("serve", ".", "--speculative-algorithm", "EAGLE9"), "'EAGLE9' is not one of 'NGRAM', 'EAGLE', 'EAGLE2'"),
        (("drafter", "--address", "unix:/d", "--algorithm", "x"), "'x' is not one of 'NGRAM', 'EAGLE', 'EAGLE2'"),
        (("verifier", "."), "Missing option '--address'"),
        (("gateway", "."), "Missing option '--verifier'"),
    ],
)
def test_usage_errors_name_the_argument(arguments: tuple[str, ...], message: str) -> None:
    result = foretoken(*arguments)
    assert result.returncode == 2
    assert message in re.sub(r"\s+", " ", result.stderr)


def test_complete_says_how_to_start_a_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = foretoken("complete", "x", FORETOKEN_URL=url)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"foretoken: nothing answers at {url}; start a server with: make serve, or: foretoken serve MODEL; "
        "or name a running one with --url"
    ]


def test_help_and_version() -> None:
    assert foretoken("--version").stdout.strip() == "0.1.0"
    for arguments in ((), ("--help",)):
        result = foretoken(*arguments)
        assert result.returncode == 0
        assert all(
            command in result.stdout for command in ("serve", "gateway", "verifier", "drafter", "probe", "complete")
        )


def test_help_loads_no_service_and_nothing_heavy() -> None:
    loaded = loaded_by("from foretoken.cli import app\napp(['--help'], standalone_mode=False)")
    assert loaded & {"torch", "transformers", "numba", "numpy", "grpc", "pydantic", "httpx", "fastapi"} == set()
    assert loaded & {"gateway", "verifier_svc", "drafter_svc"} == set()


def test_the_settings_of_all_services_load_nothing_heavy() -> None:
    """A gateway's image has no torch, numba or llguidance."""
    loaded = loaded_by("import foretoken.commands.service_settings")
    assert loaded & {"torch", "transformers", "numba", "llguidance", "numpy", "fastapi"} == set()


def test_complete_loads_no_model_code() -> None:
    loaded = loaded_by("import foretoken.commands.complete")
    assert loaded & {"torch", "transformers", "numba", "numpy", "fastapi"} == set()


def test_a_gateway_loads_no_torch() -> None:
    loaded = loaded_by("import foretoken.cli, gateway.server")
    assert "torch" not in loaded
    assert loaded & {"verifier_svc", "drafter_svc", "foretoken_kernels"} == set()
