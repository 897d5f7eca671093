"""Commands refuse bad flags by name, in one line, before anything starts; so does a dry run."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from foretoken.cli import app, main
from foretoken.commands.settings_command import VLLM_NAMES
from foretoken.errors import CheckpointError, ConfigError
from foretoken.service import Service
from tests.support.command_line import DEMO, ROOT, foretoken, free_port, loaded_by, serve

VERIFIER = ("verifier", "--address", "unix:/v")


@pytest.mark.parametrize(
    ("command", "drafters"),
    [
        (("serve",), "ngram (NGRAM, in-process)"),
        (("serve", "--speculative-algorithm", "NONE"), "none"),
        (("serve", "--speculative-algorithm", "none"), "none"),
        (
            ("serve", "--drafter", "name=a,algorithm=NGRAM", "--drafter", "name=b,algorithm=NGRAM"),
            "a (NGRAM, in-process), b (NGRAM, in-process)",
        ),
        (VERIFIER, "none"),
        (
            (*VERIFIER, "--drafter", "name=a,address=unix:/a", "--drafter", "name=b,algorithm=NGRAM"),
            "b (NGRAM, in-process), a at unix:/a",
        ),
    ],
)
def test_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    command: tuple[str, ...],
    drafters: str,
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / "target" / name, tmp_path)
    result = CliRunner().invoke(app, [*command, str(tmp_path), "--dry-run"])
    drafts = "without drafts" if drafters == "none" else "with drafts"
    # What an attached drafter runs is not known.
    model = "with a model" if " at " in drafters else "without a model"
    assert result.stdout == f"a plan {drafts}, {model}\n  drafters   {drafters}\n"
    assert (served, supervised) == ({}, {})


@pytest.mark.parametrize(
    "given", ["--max-model-len=9", "--gpu-memory-utilization", "--max-num-seqs", "--enforce-eager"]
)
def test_names_of_vllm_are_answered_with_ours(given: str) -> None:
    """The names given in return are flags of ``serve``."""
    result = foretoken("serve", str(DEMO / "target"), given, "7")
    name = given.partition("=")[0]
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"foretoken: {name} is vLLM's name; here it is {VLLM_NAMES[name]}\n"
    assert not set(VLLM_NAMES.values()) - set(re.findall(r"--[a-z-]+", foretoken("serve", "--help").stdout))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max-seqs", "--max-running-requests"),
        ("--max-model-length", "--context-length"),
        ("--no-prefix-caching", "--disable-radix-cache"),
        ("--enforce-eagr", "--disable-cuda-graph"),
        ("--prt", "--port"),
    ],
)
def test_a_name_close_to_one_of_vllm_is_answered_with_ours(given: str, meant: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), given, "7"])
    assert result.exit_code == 2
    assert f"No such option '{given}'. Did you mean '{meant}'?" in result.output


@pytest.mark.parametrize("given", ["--speculative-config={}", "--enable-prefix-caching"])
def test_flags_of_vllm_without_an_equivalent_are_explained(given: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), given])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"{given.partition('=')[0]} is vLLM's; here ")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert set(re.findall(r"--[a-z-]+", str(result.exception).partition(";")[2])) <= set(
        re.findall(r"--[a-z-]+", shown)
    )


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("serve", "--enable-prefix-cache"),
        ("serve", "--no-enforce-eager"),
        ("gateway", "--max-model-length"),
        ("gateway", "--max-model-len"),
        ("drafter", "--max-num-seqs"),
    ],
)
def test_no_flag_is_meant_that_does_the_opposite_or_is_not_there(command: str, given: str) -> None:
    result = CliRunner().invoke(app, [command, str(DEMO / "target"), given, "7"])
    assert result.exit_code == 2
    assert f"No such option '{given}'." in result.output
    assert not set(VLLM_NAMES.values()) & set(re.findall("--[a-z-]+", result.output))


@pytest.mark.parametrize("plan", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "18000", "--grpc-port", "18000"), "--port and --grpc-port are both 18000"),
        (("--host", "300.1.1.1"), "--host: cannot resolve '300.1.1.1'"),
        (("--otlp-traces-endpoint", "localhost:4317"), "--otlp-traces-endpoint: expected http://host:port"),
        (("--otlp-traces-endpoint", "http://localhost:4317"), "--otlp-traces-endpoint needs another package: "),
    ],
)
def test_what_a_gateway_could_not_do_is_refused_before_anything_starts(
    flags: tuple[str, ...],
    message: str,
    plan: tuple[str, ...],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("foretoken.tracing.version", missing)
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), *flags, *plan])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)
    assert supervised == {}


def test_dry_run_refuses_a_checkpoint_without_a_tokenizer(tmp_path: Path, served: dict[str, tuple[Any, ...]]) -> None:
    (tmp_path / "config.json").touch()
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--dry-run"])
    assert str(result.exception) == f"{tmp_path} holds no checkpoint: there is no tokenizer.json"


def test_a_folder_of_several_checkpoints_is_refused_with_the_name_of_the_target(
    served: dict[str, tuple[Any, ...]],
) -> None:
    result = CliRunner().invoke(app, ["serve", str(DEMO), "--dry-run"])
    assert str(result.exception) == f"{DEMO} holds no checkpoint: there is no config.json; {DEMO / 'target'} has one"


@pytest.mark.parametrize("plan", [("--dry-run",), ()])
@pytest.mark.parametrize("source", ["auto", "vllm", "none"])
def test_unusable_sampling_defaults_are_refused_before_anything_starts(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    plan: tuple[str, ...],
    source: str,
) -> None:
    """``vllm`` and ``none`` do not read them."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / "target" / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 9.0}')
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--generation-config", source, *ports, *plan])
    if source == "auto":
        assert isinstance(result.exception, CheckpointError)
        assert "temperature must be a number in [0, 2], got 9.0" in str(result.exception)
        assert supervised == {}
    else:
        assert result.exit_code == 0, result.output


def test_dry_run_refuses_what_the_gateway_could_not_read(tmp_path: Path, served: dict[str, tuple[Any, ...]]) -> None:
    """A start would find these faults in the gateway."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), "--dry-run", "--chat-template", str(template)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"--chat-template: {template}, line 2: ")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--dry-run"])
    assert isinstance(result.exception, CheckpointError) and "tokenizer.json: cannot be loaded" in str(result.exception)
    assert served == {}


def test_dry_run_refuses_a_drafter_that_could_not_start(tmp_path: Path, served: dict[str, tuple[Any, ...]]) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--speculative-algorithm", "EAGLE3", "--dry-run"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == ("--speculative-draft-model-path: must be given for a drafter of algorithm EAGLE3")
    assert served == {}


@pytest.mark.parametrize(
    "words",
    [
        ("--attention-backend", "flashinfer"),
        ("--disable-cuda-graph",),
        ("--disable-overlap-schedule",),
        ("--numerics", "fast"),
    ],
)
def test_what_has_an_effect_on_a_gpu_only_is_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], supervised: dict[str, Service]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = foretoken("serve", str(tmp_path), "--device", "cpu", *words, *ports)
    assert result.returncode == 2 and not supervised
    assert result.stderr.startswith(f"foretoken: {' '.join(words[:1])}") and "an effect on a GPU only" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "./nowhere"), "no such folder: ./nowhere"),
        (
            ("verifier", ".", "--address", "unix:/v", "--drafter", "name=a,algorithm=NGRAM,placement=process"),
            "--drafter: placement is for foretoken serve; here drafters run in the verifier's process",
        ),
        (("serve", ".", "--threads", "-1"), "--threads: expected at least 0, got -1"),
        (("serve", ".", "--port", "70000"), "--port: expected at most 65535, got 70000"),
        (("serve", ".", "--port", "4001", "--grpc-port", "4001"), "--port and --grpc-port are both 4001"),
        (("serve", ".", "--request-timeout", "0"), "--request-timeout: expected more than 0.0, got 0.0"),
        (
            ("serve", ".", "--speculative-algorithm", "NONE", "--speculative-ngram-capacity", "5000"),
            "--speculative-ngram-capacity has an effect only with a drafter of --speculative-algorithm NGRAM",
        ),
        (
            ("verifier", ".", "--address", "unix:/v", "--speculative-ngram-order", "recency"),
            "--speculative-ngram-order has an effect only with --drafter name=NAME,algorithm=NGRAM",
        ),
        (
            ("verifier", ".", "--address", "unix:/v", "--drafter", "ngram"),
            "--drafter: expected key=value,key=value with each key once, got 'ngram'",
        ),
        (("drafter", "--address", "unix:/d", "--name", "N!"), "--name: expected 1 to 64 characters of a-z"),
        (("complete", "x", "--no-speculation", "--drafter", "n"), "--no-speculation and --drafter exclude each other"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    if arguments[0] == "serve" and "--port" not in arguments:
        arguments += ("--port", free_port(), "--grpc-port", free_port())
    result = foretoken(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"foretoken: {message}")


A_NAME = "1 to 64 characters of a-z, 0-9, '_', '.' and '-', the first a letter or digit"
FOR_MODELS = "is for drafters of algorithm EAGLE, EAGLE3, MTP, STANDALONE, not for NGRAM"
KEYS = "name, algorithm, model, token_map, threads, coupled_noise, placement"
MAP = "models/demo/token_map.safetensors"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("name=a,algorithm=NGRAM,color=red", f"color: there is no such key; known keys: {KEYS}"),
        ("name=a,algorithm=EAGLE3,modle=x", f"modle: there is no such key; known keys: {KEYS}. Did you mean 'model'?"),
        (
            "name=a,address=unix:/a.sock",
            "address: a drafter that runs elsewhere is taken by foretoken drafters attach, or by foretoken verifier",
        ),
        ("name=a,algorithm=FOO", "algorithm: expected NGRAM, EAGLE, EAGLE3, MTP or STANDALONE, got 'FOO'"),
        ("algorithm=NGRAM", "name: must be given"),
        ("name=a", "algorithm: must be given"),
        ("name=A,algorithm=NGRAM", f"name: expected {A_NAME}, got 'A'"),
        ("name=auto,algorithm=NGRAM", "name: auto means a choice of drafters, got 'auto'"),
        ("name=a,algorithm=EAGLE3", "model: must be given for a drafter of algorithm EAGLE3"),
        ("name=a,algorithm=EAGLE3,model=", "model: must not be empty, got ''"),
        ("name=a,algorithm=EAGLE3,model=/nowhere", "model: no such folder: /nowhere"),
        ("name=a,algorithm=EAGLE3,model=README.md", "model: expected a folder or a hub id, not a file: README.md"),
        (
            "name=a,algorithm=MTP,model=models/demo/eagle3",
            "model: is for drafters of algorithm EAGLE, EAGLE3, STANDALONE, not for MTP",
        ),
        (
            "name=a,algorithm=NGRAM,model=x",
            "model: is for drafters of algorithm EAGLE, EAGLE3, STANDALONE, not for NGRAM",
        ),
        (
            "name=a,algorithm=NGRAM,threads=2",
            "threads: is for drafters of algorithm EAGLE, EAGLE3, MTP, STANDALONE, not for NGRAM",
        ),
        (
            "name=a,algorithm=NGRAM,coupled_noise=no",
            "coupled_noise: is for drafters of algorithm EAGLE, EAGLE3, MTP, STANDALONE, not for NGRAM",
        ),
        (
            f"name=a,algorithm=NGRAM,token_map={MAP}",
            "token_map: is for drafters of algorithm EAGLE, EAGLE3, MTP, not for NGRAM",
        ),
        ("name=a,algorithm=MTP,threads=x", "threads: expected a whole number, got 'x'"),
        ("name=a,algorithm=MTP,threads=-1", "threads: expected at least 0, got '-1'"),
        ("name=a,algorithm=MTP,threads=5000", "threads: expected at most 1024, got '5000'"),
        ("name=a,algorithm=MTP,coupled_noise=maybe", "coupled_noise: expected true or false, got 'maybe'"),
        ("name=a,algorithm=NGRAM,placement=gpu", "placement: expected process or in-process, got 'gpu'"),
    ],
)
def test_a_mistake_in_a_drafter_names_its_key(spec: str, message: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(ROOT / "models/demo/target"), "--dry-run", "--drafter", spec])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).partition(": ")[2] == f"--drafter {message}"


@pytest.mark.parametrize(
    ("spec", "drafter"),
    [
        ("name=b,algorithm=FOO", "b"),
        ("name=b,algorithm=EAGLE3,model=/nowhere", "b"),
        (f"name=b,algorithm=EAGLE,model={DEMO}/eagle3", "b"),
        ("algorithm=NGRAM", "2 of 3"),
        ("name=B,algorithm=NGRAM", "2 of 3"),
        ("ngram", "2 of 3"),
    ],
)
def test_a_mistake_in_one_of_several_drafters_names_the_drafter(spec: str, drafter: str) -> None:
    specs = ("name=a,algorithm=NGRAM", spec, "name=c,algorithm=NGRAM")
    flags = [word for text in specs for word in ("--drafter", text)]
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), "--dry-run", *flags])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"drafter {drafter}: --drafter")


def test_a_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"name=a,algorithm=EAGLE,model={DEMO}/eagle3"
    monkeypatch.setattr(sys, "argv", ["foretoken", "serve", f"{DEMO}/target", "--dry-run", "--drafter", spec])
    with pytest.raises(SystemExit, match="2"):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("holds a head of algorithm EAGLE3, not of EAGLE; use algorithm EAGLE3")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--drafter", "name=a,algorithm=MTP"),
            r"drafter a: --drafter algorithm: .*/demo/target has no MTP layers: it holds no ",
        ),
        (("--speculative-algorithm", "NEXTN"), r"--speculative-algorithm: .*/demo/target has no MTP layers"),
        (
            ("--drafter", f"name=a,algorithm=EAGLE,model={DEMO}/eagle3"),
            r"drafter a: --drafter model: .*/demo/eagle3 holds a head of algorithm EAGLE3, not of EAGLE",
        ),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{DEMO}/target"),
            r"--speculative-draft-model-path: .*/demo/target holds no draft head",
        ),
        (
            ("--drafter", f"name=a,algorithm=STANDALONE,model={DEMO}/eagle3"),
            r"drafter a: --drafter model: .*/demo/eagle3/tokenizer\.json does not exist: the tokenizers of draft ",
        ),
        (
            ("--drafter", f"name=a,algorithm=EAGLE3,model={DEMO}/eagle3,token_map=/nowhere"),
            r"drafter a: --drafter token_map: /nowhere: no such file",
        ),
    ],
)
@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_a_drafter_whose_files_cannot_do_is_refused_before_anything_starts(
    flags: tuple[str, ...], message: str, dry_run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("foretoken.supervisor.Supervisor", lambda *services, **callbacks: started.append(services))
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), *flags, *ports, *dry_run])
    assert isinstance(result.exception, ConfigError)
    assert re.match(message, str(result.exception)), str(result.exception)
    assert started == []


@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_unknown_keys_of_a_head_are_named(
    tmp_path: Path, dry_run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO / "eagle3", tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"my_key": 3}))
    monkeypatch.setattr("foretoken.cli._supervise", lambda settings, folder: 0)
    drafter = f"name=a,algorithm=EAGLE3,model={config.parent}"
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = CliRunner().invoke(app, ["serve", str(DEMO / "target"), "--drafter", drafter, *ports, *dry_run])
    assert result.exit_code == 0, result.output
    assert result.stderr.count(f"{config}: not known and ignored: my_key\n") == 1


def test_what_a_drafter_is_checked_by_loads_no_torch() -> None:
    """The checks run in the supervisor's process, which lives as long as the server."""
    check = f"ALGORITHMS['EAGLE3'].check_files(Path('{DEMO}/eagle3'), Path('{DEMO}/target'))"
    loaded = loaded_by(f"from pathlib import Path\nfrom drafter_svc.algorithms import ALGORITHMS\n{check}")
    assert loaded & {"torch", "transformers", "numba"} == set()


SEVENTEEN = tuple(word for i in range(17) for word in ("--drafter", f"name=d{i},algorithm=NGRAM"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SEVENTEEN, "--drafter: at most 16 drafters, got 17"),
        (("--drafter", "name=a,algorithm=NGRAM") * 2, "--drafter name: a is given twice"),
        (("--admin-api-key-file", "/nowhere/key"), "--admin-api-key-file: cannot read /nowhere/key: "),
        (("--chat-template", "/nowhere/chat.jinja"), "--chat-template: cannot read /nowhere/chat.jinja: "),
        (
            ("--simulate-accept-length", "9"),
            "--simulate-accept-length: expected at most 8, the nodes of a tree (--speculative-num-draft-tokens), got 9",
        ),
        (("--request-timeout", "0"), "--request-timeout: expected more than 0.0, got 0.0"),
        (
            ("--drafter", "name=a,algorithm=NGRAM", "--speculative-algorithm", "NGRAM"),
            f"--speculative-algorithm and --drafter exclude each other; keys of --drafter: {KEYS}",
        ),
    ],
)
@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_what_a_service_would_refuse_is_refused_before_anything_starts(
    flags: tuple[str, ...],
    message: str,
    dry_run: tuple[str, ...],
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *flags, *ports, *dry_run])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)
    assert (served, supervised) == ({}, {})


@pytest.mark.parametrize("drafter", ["name=a,address=unix:/a", "name=a,algorithm=NGRAM"])
def test_a_verifier_refuses_one_name_twice_before_it_loads(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], drafter: str
) -> None:
    flags = ("--drafter", "name=a,algorithm=NGRAM", "--drafter", drafter)
    result = CliRunner().invoke(app, ["verifier", str(tmp_path), "--address", "unix:/v", *flags])
    assert str(result.exception) == "--drafter name: a is given twice"
    assert served == {}


def test_a_comma_in_a_path_is_refused_where_it_could_not_be_passed_on(
    tmp_path: Path, supervised: dict[str, Service]
) -> None:
    for name in ("config.json", "tokenizer.json", "a,b/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    flags = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(tmp_path / "a,b"))
    serve(str(tmp_path), *flags)
    supervised.clear()
    ports = ("--port", free_port(), "--grpc-port", free_port())
    for plan in ((), ("--dry-run",)):
        words = ["serve", str(tmp_path), *flags, *ports, "--drafter-placement", "in-process", *plan]
        error = CliRunner().invoke(app, words).exception
        assert str(error) == f"a drafter inside the verifier cannot have a comma in its model: {tmp_path}/a,b"
    assert supervised == {}


def test_a_port_in_use_is_noticed_before_anything_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = foretoken("serve", "demo", "--port", free_port(), "--grpc-port", port)
    assert result.returncode == 2
    expected = f"foretoken: port {port} is in use; choose another with --grpc-port (make serve GRPC_PORT=...)\n"
    assert result.stderr == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "no such folder: ./nowhere"),
        ("/nowhere/at/all", "no such folder: /nowhere/at/all"),
        ("nonexist", "nonexist is neither a folder nor a cached model, and the hub does not answer"),
        ("org/nonexist", "org/nonexist is neither a folder nor a cached model, and the hub does not answer"),
    ],
)
def test_a_port_in_use_does_not_hide_a_mistake_in_the_model(model: str, message: str) -> None:
    """A server runs already, so a user who mistypes the next
    model's name has the port in use as well.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        flags = ("--port", port, "--grpc-port", free_port())
        result = foretoken("serve", model, *flags, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert result.stderr.startswith(f"foretoken: {message}") and result.stderr.count("\n") == 1
