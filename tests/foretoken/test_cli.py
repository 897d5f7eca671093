"""The command line: flags against settings, help and usage, no import too many."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from click.testing import CliRunner
from pydantic import BaseModel

from drafter_svc.config import DrafterSettings, NgramSettings
from foretoken.cli import app
from foretoken.config import flag_of
from gateway.config import GatewaySettings
from tests.support.command_line import foretoken, free_port, loaded_by
from verifier_svc.config import VerifierSettings

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS: dict[str, type[BaseModel]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
NGRAM_FIELDS = {f"ngram_{name}": field.default for name, field in NgramSettings.model_fields.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_its_flag_and_every_flag_its_setting(name: str) -> None:
    parameters = {parameter.name for parameter in COMMANDS[name].params} - {"log_level", "revision", "dry_run"}
    fields = set(SETTINGS[name].model_fields)
    if name == "drafter":
        fields = fields - {"ngram"} | set(NGRAM_FIELDS)
    if name == "verifier":
        fields |= set(NGRAM_FIELDS)
    if name == "gateway":
        parameters |= {"model"}
    assert parameters == fields


@pytest.mark.parametrize("name", ["serve", *SETTINGS])
def test_flags_have_the_names_that_messages_give_them(name: str) -> None:
    for parameter in COMMANDS[name].params:
        if parameter.name == "model":
            continue
        nested = parameter.name in NGRAM_FIELDS
        field = parameter.name.removeprefix("ngram_")
        assert parameter.opts == [flag_of(field, "ngram") if nested else flag_of(parameter.name)]


def test_serve_has_flags_of_its_services_only() -> None:
    own = {"revision", "dry_run", "log_level", "speculative_algorithm", "drafter_placement", "drafters", "mps"}
    known = {field for settings in SETTINGS.values() for field in settings.model_fields} | set(NGRAM_FIELDS) | own
    assert {parameter.name for parameter in COMMANDS["serve"].params} <= known


@pytest.mark.parametrize("name", ["serve", *SETTINGS])
def test_help_states_the_defaults_of_the_settings(name: str) -> None:
    defaults = dict(NGRAM_FIELDS)
    for settings in SETTINGS.values():
        defaults |= {field: info.default for field, info in settings.model_fields.items()}
    defaults |= {"served_model_name": "the folder's name, or the hub id", "chat_template": "the tokenizer's"}
    defaults |= {"revision": "main", "drafters": "none", "speculative_algorithm": "NGRAM"}
    for parameter in COMMANDS[name].params:
        shown = getattr(parameter, "show_default", None)
        if isinstance(shown, str):
            assert (
                shown == f"{defaults[parameter.name]:g}"
                if isinstance(defaults[parameter.name], float)
                else str(defaults[parameter.name])
            ), parameter.name


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
        (("serve", ".", "--tensor-parallel-size", "2"), "No such option: --tensor-parallel-size"),
        (("serve", ".", "--speculative-algorithm", "EAGLE9"), "'EAGLE9' is not one of 'EAGLE', 'EAGLE2'"),
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


def test_complete_loads_no_model_code() -> None:
    loaded = loaded_by("import foretoken.commands.complete")
    assert loaded & {"torch", "transformers", "numba", "numpy", "fastapi"} == set()


def test_a_gateway_loads_no_torch() -> None:
    loaded = loaded_by("import foretoken.cli, gateway.server")
    assert "torch" not in loaded
    assert loaded & {"verifier_svc", "drafter_svc", "foretoken_kernels"} == set()
