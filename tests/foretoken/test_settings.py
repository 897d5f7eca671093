"""Each setting is a flag, environment variable, config file key, line of help and docs row."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest
from click.testing import CliRunner

from foretoken.cli import app, main
from foretoken.commands.given import Given
from foretoken.commands.options import COMMANDS, settings_of_command
from foretoken.commands.settings_command import SettingsCommand
from foretoken.commands.settings_table import rows
from foretoken.commands.sglang_flags import RENAMED_VALUES
from foretoken.commands.subjects import SUBJECTS
from foretoken.config import Setting, Settings, build, settings_of, to_environment, to_flags
from foretoken.errors import ConfigError
from gateway.config import GatewaySettings
from tests.support.command_line import ROOT, foretoken, free_port

ALL = [(command, setting) for command in COMMANDS for setting in settings_of_command(command)]
IDS = [f"{command} {setting.flag}" for command, setting in ALL]
# Words that a command cannot do without.
NEEDED = {
    "serve": ("m",),
    "gateway": ("m", "--verifier", "unix:/v"),
    "verifier": ("m", "--address", "unix:/v"),
    "drafter": ("--address", "unix:/d"),
    "bench": (),
}
SPEC = "name=a,algorithm=NGRAM"
TEXTS = {
    "drafters": SPEC,
    "verifiers": "unix:/w",
    "address": "unix:/a",
    "model": "folder",
    "allowed_origins": "https://other",
    "gateway_workers": "2",
    "kv_events": "tcp://*:5557",
    "kv_events_replay": "tcp://*:5558",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


def given(command: str, *words: str) -> Given:
    """Return the settings that a command takes from its words."""
    found = app.commands[command]
    assert isinstance(found, SettingsCommand)
    return found.given(found.make_context(command, list(words)))


def value_of(values: Any, setting: Setting) -> Any:
    for name in setting.path:
        values = values[name]
    return values


def another(setting: Setting) -> Any:
    """Return an allowed value other than the setting's default."""
    kind = setting.type
    if kind is bool:
        return True
    choices = setting.shown.choices or (get_args(kind) if get_origin(kind) is Literal else ())
    if choices:
        return next(choice for choice in choices if choice != setting.default)
    if kind in (int, float):
        bounds = setting.field.metadata
        least = next((bound.ge for bound in bounds if hasattr(bound, "ge")), 1)
        least = next((bound.gt + 1 for bound in bounds if hasattr(bound, "gt")), least)
        return kind(least + 1 if least == setting.default else least)
    return TEXTS.get(setting.path[0], "other")


def words_of(setting: Setting, value: Any) -> tuple[str, ...]:
    return (setting.flag,) if value is True else (setting.flag, str(value))


def just_outside(setting: Setting) -> list[float]:
    """Return values beyond each end of a setting's range."""
    found = []
    for bound in setting.field.metadata:
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if (end := getattr(bound, name, None)) is not None:
                found.append(setting.type(end + step))
    return found


@pytest.mark.parametrize(("command", "setting"), ALL, ids=IDS)
def test_a_flag_gives_its_value_and_none_gives_nothing(command: str, setting: Setting) -> None:
    value = another(setting)
    if setting.is_argument:
        assert given(command, str(value), *NEEDED[command][1:]).values["model"] == value
        return
    needed = tuple(word for word in NEEDED[command] if setting.flag not in NEEDED[command] or word == "m")
    seen = given(command, *needed, *words_of(setting, value)).values
    assert value_of(seen, setting) == ((value,) if setting.is_repeated else value)
    if not setting.is_required:
        assert setting.path[0] not in given(command, *NEEDED[command]).values


@pytest.mark.parametrize("suffix", ["toml", "yaml", "yml"])
@pytest.mark.parametrize("command", [*COMMANDS, "tune"])
def test_a_config_file_gives_every_setting_by_the_name_of_its_flag(command: str, suffix: str, tmp_path: Path) -> None:
    values = {setting: another(setting) for setting in settings_of_command(command)}
    lines = []
    for setting, value in values.items():
        item = str(value).lower() if isinstance(value, (bool, int, float)) else f'"{value}"'
        item = f"[{item}]" if setting.is_repeated else item
        lines.append(f"{setting.key} = {item}" if suffix == "toml" else f"{setting.key}: {item}")
    file = tmp_path / f"settings.{suffix}"
    file.write_text("\n".join(lines))
    seen = given(command, "--config", str(file)).values
    for setting, value in values.items():
        assert value_of(seen, setting) == ((value,) if setting.is_repeated else value), setting.flag


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    file = tmp_path / f"settings.{suffix}"
    lines = {"toml": 'otlp-traces-endpoint = "http://file:1"\nport = 81\n'}
    file.write_text(lines.get(suffix, "otlp-traces-endpoint: http://file:1\nport: 81\n"))

    def seen(*words: str) -> GatewaySettings:
        more = given("gateway", *NEEDED["gateway"], *words)
        return more.settings(GatewaySettings, served_model_name="m")

    monkeypatch.delenv(name, raising=False)
    assert seen().otlp_traces_endpoint is None
    assert (seen("--config", str(file)).otlp_traces_endpoint, seen("--config", str(file)).port) == ("http://file:1", 81)
    monkeypatch.setenv(name, "http://variable:1")
    assert seen("--config", str(file)).otlp_traces_endpoint == seen().otlp_traces_endpoint == "http://variable:1"
    words = ("--config", str(file), "--otlp-traces-endpoint", "http://flag:1", "--port", "82")
    assert (seen(*words).otlp_traces_endpoint, seen(*words).port) == ("http://flag:1", 82)


def test_the_variables_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = [(str(setting.shown.env), command, setting) for command, setting in ALL if setting.shown.env]
    assert {name for name, _, _ in variables} == {
        *("FORETOKEN_ADMIN_API_KEY_FILE", "FORETOKEN_API_KEY", "FORETOKEN_LINK_TOKEN_FILE", "FORETOKEN_PROBE_KEY"),
        *("FORETOKEN_COMPARE_API_KEY", "FORETOKEN_URL", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    }
    for variable, command, setting in variables:
        monkeypatch.setenv(variable, "there")
        expected = ("there",) if setting.is_repeated else "there"
        assert value_of(given(command, *NEEDED[command]).values, setting) == expected
        # Child processes get a secret only if it is meant for them.
        assert (variable in os.environ) is not setting.shown.secret


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("color: 1", "--config: {file}: there is no setting 'color'"),
        ("prot: 1", "--config: {file}: there is no setting 'prot'. Did you mean 'port'?"),
        ("drafter: name=a,algorithm=NGRAM", "--config: {file}: drafter: expected a list"),
        ("port: [1]", "--config: {file}: port: expected one value"),
        ("port: {a: 1}", "--config: {file}: port: expected one value"),
        ("port:", "--config: {file}: port: expected one value"),
        ("port: null", "--config: {file}: port: expected one value"),
        ("port: 1\nhost: a\nport: 2", "--config: cannot read {file}: line 3: port is there twice"),
        ("- port", "--config: cannot read {file}: expected a mapping of settings"),
        ("port: [1", "--config: cannot read {file}: "),
        ("port: !!python/object:os.system {}", "--config: {file}: port: expected one value"),
        ("port: 70000", "--port: expected at most 65535, got 70000"),
        ("port: 1.5", "Invalid value for '--port': '1.5' is not a valid integer"),
        ("port: 0x10", "Invalid value for '--port': '0x10' is not a valid integer"),
        ("numerics: x", "Invalid value for '--numerics': 'x' is not one of"),
        ("dry-run: maybe", "Invalid value for '--dry-run': 'maybe' is not a valid boolean"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_refused_by_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    monkeypatch.setattr("sys.argv", ["foretoken", "serve", "m", "--config", str(file)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message.format(file=file) in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_values_in_yaml_are_read_as_they_are_written(tmp_path: Path) -> None:
    """YAML 1.1 alone would make false of ``off`` and a number of ``1_000`` or ``12:30``."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        "mps: off\nserved-model-name: 12:30\nrevision: 1e3\nspeculative-algorithm: NONE\nmem-fraction-static: 0.50\n"
        "disable-radix-cache: yes\nhost: 'null'\ndrafter:\n- name=a,algorithm=NGRAM\n- 'name=b,algorithm=MTP'\n"
    )
    assert given("serve", "m", "--config", str(file)).values == {
        "model": "m",
        "mps": "off",
        "served_model_names": ("12:30",),
        "revision": "1e3",
        "speculative_algorithm": "NONE",
        "mem_fraction_static": 0.5,
        "disable_radix_cache": True,
        "host": "null",
        "drafters": ("name=a,algorithm=NGRAM", "name=b,algorithm=MTP"),
    }
    file.write_text("# nothing but this\n")
    assert given("serve", "m", "--config", str(file)).values == {"model": "m"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("color = 1", "--config: {file}: there is no setting 'color'"),
        ("drafter = 'name=a,algorithm=NGRAM'", "--config: {file}: drafter: expected a list"),
        ("port = [1]", "--config: {file}: port: expected one value"),
        ("port =", "--config: cannot read {file}: "),
        ("port = 70000", "--port: expected at most 65535, got 70000"),
        ("port = 1.5", "Invalid value for '--port': '1.5' is not a valid integer"),
        ("numerics = 'x'", "Invalid value for '--numerics': 'x' is not one of"),
        ("dry-run = 'maybe'", "Invalid value for '--dry-run': 'maybe' is not a valid boolean"),
    ],
)
def test_a_mistake_in_a_config_file_has_status_2(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    result = foretoken("serve", "m", "--config", str(file))
    assert result.returncode == 2
    assert message.format(file=file) in re.sub(r"\s+", " ", result.stderr)


def test_a_config_file_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--config", "/nowhere.toml"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--config: cannot read /nowhere.toml: ")


@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [
        pytest.param(command, setting, value, id=f"{command} {setting.flag} {value}")
        for command, setting in ALL
        for value in (just_outside(setting) if setting.type in (int, float) else ())
        # serve takes some of these as SGLang means them.
        if command != "serve" or str(value) not in RENAMED_VALUES.get(setting.flag, {})
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_flag(
    command: str, setting: Setting, value: float, served: dict[str, Any]
) -> None:
    more = ("--drafter", SPEC) if command == "verifier" else ("--dry-run",) if command == "serve" else ()
    if (command, setting.path) == ("drafter", ("threads",)):
        more = ("--algorithm", "MTP")
    words = (command, *NEEDED[command], *more, setting.flag, str(value))
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(f"{setting.flag}: expected "), result.exception
    assert served == {}


@pytest.mark.parametrize(
    "setting",
    [setting for _, setting in ALL if setting.type in (int, float)],
    ids=[name for name, (_, setting) in zip(IDS, ALL, strict=True) if setting.type in (int, float)],
)
def test_every_number_has_a_least_value(setting: Setting) -> None:
    assert any(hasattr(bound, name) for bound in setting.field.metadata for name in ("ge", "gt"))


@pytest.mark.parametrize("command", [*COMMANDS, "tune"])
def test_help_has_every_setting_with_its_default_and_variable(command: str) -> None:
    text = re.sub(r"\s+", "", CliRunner().invoke(app, [command, "--help"]).output)
    for setting in settings_of_command(command):
        assert setting.field.description, setting.flag
        if setting.shown.hidden:
            assert setting.flag not in text
            continue
        default = setting.shown.unset or setting.default
        is_said = setting.shown.unset or not (default is None or default is False or default == ())
        shown = f"default:({default})" if setting.shown.unset else f"default:{default}"
        line = f"{setting.field.description}{'[' if is_said else ''}".replace(" ", "")
        _, found, rest = text.partition(setting.flag)
        assert found and line in rest, setting.flag
        about = rest.partition(line)[2].partition("]")[0]
        assert not is_said or shown.replace(" ", "") in about, setting.flag
        assert setting.shown.env is None or f"envvar:{setting.shown.env}" in about


def test_every_flag_has_a_heading() -> None:
    settings = [*(setting for _, setting in ALL), *settings_of_command("doctor"), *settings_of_command("tune")]
    shown = {setting.flag for setting in settings if not setting.shown.hidden and not setting.is_argument}
    rows = {flag for flags in SUBJECTS.values() for flag in flags}
    without = {flag for flag in shown - rows if not flag.startswith("--speculative-")}
    assert not without, "name a heading for each in foretoken/commands/subjects.py"
    assert rows - shown == {"--config", "--help"}


def test_help_has_headings_in_order() -> None:
    shown = set()
    for command in ("bench", "serve", "tune"):
        text = CliRunner().invoke(app, [command, "--help"]).output
        headings = re.findall(r"^(\w.*):$", text, re.MULTILINE)
        first = ["Positional arguments"] if command != "bench" else []
        assert headings == [*first, *(subject for subject in SUBJECTS if subject in headings)]
        shown |= {*headings}
    assert shown == {"Positional arguments", *SUBJECTS}
    access = text.partition("\nAccess:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--[a-z-]+)", access, re.MULTILINE) == [*SUBJECTS["Access"]]


@pytest.mark.parametrize("command", [*COMMANDS, "tune", "doctor"])
def test_no_flag_is_there_twice(command: str) -> None:
    flags = [option for parameter in app.commands[command].get_params(context(command)) for option in parameter.opts]
    assert sorted(set(flags)) == sorted(flags)


def context(command: str) -> click.Context:
    return click.Context(app.commands[command], info_name=command)


def test_the_docs_have_the_table_of_all_settings() -> None:
    """``make docs`` writes it."""
    page = (ROOT / "docs" / "settings.md").read_text().splitlines()
    assert page[page.index("| --- | --- | --- | --- | --- |") + 1 :] == rows()


def test_every_command_starts_with_a_config_file_alone(
    tmp_path: Path, served: dict[str, Any], supervised: dict[str, Any]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    file = tmp_path / "settings.toml"
    ports = f"port = {free_port()}\ngrpc-port = {free_port()}\n"
    file.write_text(f'model = "{tmp_path}"\n{ports}served-model-name = "demo"\ndisable-radix-cache = true\n')
    result = CliRunner().invoke(app, ["serve", "--config", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--disable-radix-cache" in supervised["verifier"].command
    # Its services get flags: they read no file.
    assert not any("--config" in service.command for service in supervised.values())


@pytest.mark.parametrize("command", ["gateway", "verifier", "drafter"])
def test_settings_become_flags_that_give_them_again(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets go through the environment: everybody can read a command line."""
    kind: type[Settings] = COMMANDS[command][0]
    values = {
        setting.path[0]: (another(setting),) if setting.is_repeated else another(setting)
        for setting in settings_of(kind)
        if len(setting.path) == 1
    }
    if command == "verifier":
        values["drafters"] = [{"name": "a", "address": "unix:/a"}]
    if command == "drafter":
        values["algorithm"] = "EAGLE3"
    settings = build(kind, values)
    for variable, text in to_environment(settings).items():
        monkeypatch.setenv(variable, text)
    again = given(command, *to_flags(settings))
    more = {"drafters": values["drafters"]} if command == "verifier" else {}
    assert again.settings(kind, **more) == settings
    # The options of another algorithm.
    expected = kind.model_fields.keys() - {"ngram"}
    assert {name for name, field in kind.model_fields.items() if getattr(settings, name) != field.default} == expected
    assert again.values.keys() == expected
