"""The command line: flags against settings, what `serve` starts, one line for a mistake, no import too many."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

import drafter_svc
import gateway
import verifier_svc
from drafter_svc.config import DrafterSettings, NgramSettings
from foretoken.cli import app
from foretoken.config import flag_of
from foretoken.errors import ConfigError
from foretoken.mps import PIPES
from foretoken.stack import GATEWAY_DRAIN_S
from foretoken.supervisor import Service
from gateway.config import GatewaySettings
from tests.support import fake_mps
from verifier_svc.config import DrafterEndpoint, VerifierSettings

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS: dict[str, type[BaseModel]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
NGRAM_FIELDS = {f"ngram_{name}": field.default for name, field in NgramSettings.model_fields.items()}
ONE_OF_EACH = (
    *("--served-model-name", "demo", "--host", "127.0.0.1", "--request-timeout", "30", "--dtype", "bfloat16"),
    *("--threads", "2", "--context-length", "512", "--block-size", "8", "--max-total-tokens", "4096"),
    *("--max-running-requests", "4", "--max-queued-requests", "5", "--chunked-prefill-size", "64"),
    *("--disable-radix-cache", "--speculative-num-draft-tokens", "6", "--speculative-max-batch-size", "3"),
    *("--simulate-accept-length", "2.5", "--numerics", "strict", "--attention-backend", "triton"),
)
NGRAM = (
    *("--speculative-ngram-min-match-window-size", "2", "--speculative-ngram-max-match-window-size", "5"),
    *("--speculative-ngram-min-bfs-breadth", "2", "--speculative-ngram-max-bfs-breadth", "3"),
    *("--speculative-ngram-capacity", "4096", "--speculative-ngram-order", "frequency"),
)
NGRAM_SETTINGS = NgramSettings(
    min_match_window_size=2,
    max_match_window_size=5,
    min_bfs_breadth=2,
    max_bfs_breadth=3,
    capacity=4096,
    order="frequency",
)


def foretoken(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "foretoken", *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """The arguments that each service's ``run`` was called with, by service; nothing is started."""
    seen: dict[str, tuple[Any, ...]] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments: seen.update({name: arguments})

    for name, package in (("gateway", gateway), ("verifier", verifier_svc), ("drafter", drafter_svc)):
        fake = SimpleNamespace(run=record(name), make_drafter=lambda settings: settings, plan=lambda settings: "a plan")
        monkeypatch.setattr(package, "server", fake, raising=False)
        monkeypatch.setitem(sys.modules, f"{package.__name__}.server", fake)
    return seen


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    """The services that ``serve`` hands to its supervisor, by name; nothing is started."""
    seen: dict[str, Service] = {}

    class Recorder:
        def __init__(self, services: Sequence[Service], **callbacks: object) -> None:
            seen.update({service.name: service for service in services})

        async def run(self) -> int:
            return 0

    monkeypatch.setattr("foretoken.supervisor.Supervisor", Recorder)
    # Its folders have the names of a checkpoint's files, nothing more.
    monkeypatch.setattr("drafter_svc.model_folder.check_folder", lambda algorithm, path, target: None)
    return seen


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def serve(folder: str, *arguments: str) -> None:
    """``foretoken serve`` on a folder with the files of a checkpoint, by their names at least."""
    for name in ("config.json", "tokenizer.json"):
        (Path(folder) / name).touch()
    invoke("serve", folder, *arguments, "--port", free_port(), "--grpc-port", free_port())


def words(service: Service) -> tuple[str, ...]:
    """What follows ``python -P -m foretoken``."""
    return service.command[service.command.index("foretoken") + 1 :]


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


def test_serve_starts_drafter_verifier_and_gateway_with_its_flags(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As far as can be seen there is a GPU: some of the flags are for nothing else.
    monkeypatch.setattr("foretoken.mps.DRIVER", tmp_path)
    serve(str(tmp_path), *ONE_OF_EACH, *NGRAM)
    assert list(supervised) == ["drafter ngram", "verifier", "gateway"]
    assert [service.required for service in supervised.values()] == [False, True, True]
    for service in supervised.values():
        invoke(*words(service))
    (drafter,) = served["drafter"]
    verifier, in_process = served["verifier"]
    (rim,) = served["gateway"]
    assert drafter == DrafterSettings(name="ngram", address=drafter.address, ngram=NGRAM_SETTINGS)
    assert verifier == VerifierSettings(
        model=tmp_path,
        served_model_name="demo",
        address=verifier.address,
        numerics="strict",
        attention_backend="triton",
        dtype="bfloat16",
        threads=2,
        context_length=512,
        block_size=8,
        max_total_tokens=4096,
        max_running_requests=4,
        max_queued_requests=5,
        chunked_prefill_size=64,
        disable_radix_cache=True,
        speculative_num_draft_tokens=6,
        speculative_max_batch_size=3,
        simulate_accept_length=2.5,
        drafters=(DrafterEndpoint(name="ngram", address=drafter.address),),
    )
    assert in_process == {}
    assert (rim.model, rim.served_model_name, rim.verifiers) == (tmp_path, "demo", (verifier.address,))
    assert (rim.request_timeout_s, rim.drain_timeout_s) == (30, GATEWAY_DRAIN_S)
    assert verifier.address.startswith("unix:/") and verifier.address != drafter.address


def test_telemetry_and_workers_reach_their_services(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawned: list[GatewaySettings] = []
    monkeypatch.setattr("gateway.workers.run", lambda settings, extra: spawned.append(settings) or 0)
    endpoint = "http://127.0.0.1:4317"
    flags = ("--gateway-workers", "3", "--vllm-metric-names", "--otlp-traces-endpoint", endpoint)
    serve(str(tmp_path), *flags, "--speculative-algorithm", "NONE")
    for service in supervised.values():
        invoke(*words(service))
    (verifier, _), (rim,) = served["verifier"], spawned
    assert verifier.otlp_traces_endpoint == rim.otlp_traces_endpoint == endpoint
    assert (rim.gateway_workers, rim.vllm_metric_names, rim.worker_socket) == (3, True, None)
    assert "gateway" not in served
    # A worker is a gateway like any other.
    invoke(*words(supervised["gateway"]), "--worker-socket", "/run/x/worker-0.sock")
    assert served["gateway"][0] == rim.model_copy(update={"worker_socket": Path("/run/x/worker-0.sock")})
    # OpenTelemetry's own variable does as well as the flag.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://elsewhere:4317")
    invoke("gateway", str(tmp_path), "--verifier", "unix:/v")
    assert served["gateway"][0].otlp_traces_endpoint == "http://elsewhere:4317"


def test_an_in_process_drafter_gets_its_flags_through_the_verifier(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--drafter-placement", "in-process", *NGRAM)
    assert list(supervised) == ["verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    verifier, in_process = served["verifier"]
    assert verifier.drafters == ()
    assert in_process == {"ngram": DrafterSettings(name="ngram", address="unix:/none", ngram=NGRAM_SETTINGS)}


def test_a_drafter_may_say_itself_where_it_runs(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    outside = ("--drafter", "name=head,algorithm=EAGLE3,model=.,placement=process")
    inside = ("--drafter", "name=ngram,algorithm=NGRAM,placement=in-process")
    serve(str(tmp_path), *outside, *inside)
    assert list(supervised) == ["drafter head", "verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    verifier, in_process = served["verifier"]
    assert [drafter.name for drafter in verifier.drafters] == ["head"]
    assert in_process == {"ngram": DrafterSettings(name="ngram", address="unix:/none")}
    supervised.clear()
    serve(str(tmp_path), *outside, *inside[:1], "name=ngram,algorithm=NGRAM", "--drafter-placement", "in-process")
    assert list(supervised) == ["drafter head", "verifier", "gateway"]


HEAD = ("--drafter", "name=head,algorithm=EAGLE3,model=.", "--drafter", "name=ngram,algorithm=NGRAM")


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver, and a control program of MPS on PATH; the program's journal."""
    monkeypatch.setattr("foretoken.mps.DRIVER", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    return fake_mps.write(tmp_path)


def test_verifier_and_model_drafters_are_clients_of_one_mps_daemon(
    tmp_path: Path, supervised: dict[str, Service], journal: Path
) -> None:
    serve(str(tmp_path), *HEAD)
    verifier, head = supervised["verifier"], supervised["drafter head"]
    assert verifier.environment == head.environment and PIPES in verifier.environment
    assert verifier.shares_faults and head.shares_faults and verifier.before_kill
    for other in ("drafter ngram", "gateway"):
        assert not supervised[other].environment and not supervised[other].shares_faults
    assert journal.read_text().splitlines()[-1].startswith("quit")


@pytest.mark.parametrize(
    "flags",
    [
        ("--device", "cpu", *HEAD),
        ("--drafter-placement", "in-process", *HEAD),
        ("--speculative-algorithm", "NGRAM"),
        ("--mps", "off", *HEAD),
    ],
)
def test_there_is_no_mps_daemon_where_it_is_of_no_use(
    tmp_path: Path, supervised: dict[str, Service], journal: Path, flags: tuple[str, ...]
) -> None:
    serve(str(tmp_path), *flags)
    assert not any(service.shares_faults or service.before_kill for service in supervised.values())
    assert not journal.exists()


@pytest.mark.parametrize("plan", [(), ("--dry-run",)])
def test_mps_on_is_refused_where_models_run_on_the_cpu(tmp_path: Path, journal: Path, plan: tuple[str, ...]) -> None:
    """By what only prints the plan, too."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = foretoken("serve", str(tmp_path), "--device", "cpu", "--mps", "on", *ports, *plan)
    expected = "foretoken: --mps on: models do not run on an NVIDIA GPU here\n"
    assert (result.returncode, result.stderr) == (2, expected)


@pytest.mark.parametrize(
    "words",
    [
        ("--attention-backend", "flashinfer"),
        ("--mem-fraction-static", "0.5"),
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


def test_without_an_algorithm_there_is_no_drafter(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--speculative-algorithm", "NONE")
    assert list(supervised) == ["verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    assert served["verifier"][0].drafters == ()
    assert served["verifier"][1] == {}


def test_a_verifier_takes_several_drafters(tmp_path: Path, served: dict[str, tuple[Any, ...]]) -> None:
    drafters = ("--drafter", "name=a,address=unix:/a", "--drafter", "name=b,address=h:1,transport=grpc")
    invoke("verifier", str(tmp_path), "--address", "127.0.0.1:1", *drafters)
    assert served["verifier"][0].drafters == (
        DrafterEndpoint(name="a", address="unix:/a"),
        DrafterEndpoint(name="b", address="h:1", transport="grpc"),
    )


def test_the_sockets_of_a_stack_go_with_it(tmp_path: Path, supervised: dict[str, Service]) -> None:
    serve(str(tmp_path))
    command = words(supervised["verifier"])
    socket_path = Path(command[command.index("--address") + 1].removeprefix("unix:"))
    assert not socket_path.parent.exists()


VERIFIER = ("verifier", "--address", "unix:/v")


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
    ("command", "drafters"),
    [
        (("serve",), "ngram (NGRAM)"),
        (("serve", "--speculative-algorithm", "NONE"), "none"),
        (
            ("serve", "--drafter", "name=a,algorithm=NGRAM", "--drafter", "name=b,algorithm=NGRAM"),
            "a (NGRAM), b (NGRAM)",
        ),
        (VERIFIER, "none"),
        (
            (*VERIFIER, "--drafter", "name=a,address=unix:/a", "--drafter", "name=b,algorithm=NGRAM"),
            "b (NGRAM), a at unix:/a",
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
        (tmp_path / name).touch()
    result = CliRunner().invoke(app, [*command, str(tmp_path), "--dry-run"])
    assert result.stdout == f"a plan\n  drafters   {drafters}\n"
    assert (served, supervised) == ({}, {})


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


def test_dry_run_refuses_a_drafter_that_could_not_start(tmp_path: Path, served: dict[str, tuple[Any, ...]]) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--speculative-algorithm", "EAGLE3", "--dry-run"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == ("--speculative-draft-model-path: must be given for a drafter of algorithm EAGLE3")
    assert served == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "./nowhere"), "no such folder: ./nowhere"),
        (
            ("verifier", ".", "--address", "unix:/v", "--drafter", "name=a,algorithm=NGRAM,placement=process"),
            "--drafter: placement is for foretoken serve; what is given here runs in this process",
        ),
        (("serve", ".", "--threads", "-1"), "--threads: expected at least 0, got -1"),
        (("serve", ".", "--port", "70000"), "--port: expected 1 to 65535, got 70000"),
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
KEYS = "name, algorithm, model, token_map, threads, coupled_noise, placement"
MAP = "models/demo/token_map.safetensors"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("name=a,algorithm=NGRAM,color=red", f"color: there is no such key; there is: {KEYS}"),
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
            "model: is not for a drafter of algorithm MTP, whose layers are in the target's checkpoint",
        ),
        ("name=a,algorithm=NGRAM,model=x", "model: has no effect on a drafter of algorithm NGRAM"),
        ("name=a,algorithm=NGRAM,threads=2", "threads: has no effect on a drafter of algorithm NGRAM"),
        ("name=a,algorithm=NGRAM,coupled_noise=no", "coupled_noise: has no effect on a drafter of algorithm NGRAM"),
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
    assert str(result.exception) == f"--drafter {message}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--drafter", "name=a,algorithm=MTP"), r"--drafter algorithm: .*/demo/target has no MTP layers: it holds no "),
        (("--speculative-algorithm", "NEXTN"), r"--speculative-algorithm: .*/demo/target has no MTP layers"),
        (
            ("--drafter", f"name=a,algorithm=EAGLE,model={DEMO}/eagle3"),
            r"--drafter model: .*/demo/eagle3 holds a head of the family eagle3, not of algorithm EAGLE",
        ),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", f"{DEMO}/target"),
            r"--speculative-draft-model-path: .*/demo/target holds no draft head",
        ),
        (
            ("--drafter", f"name=a,algorithm=STANDALONE,model={DEMO}/eagle3"),
            r"--drafter model: .*/demo/eagle3/tokenizer\.json does not exist: the tokenizers of draft model and target",
        ),
        (
            ("--drafter", f"name=a,algorithm=EAGLE3,model={DEMO}/eagle3,token_map=/nowhere"),
            r"--drafter token_map: /nowhere: no such file",
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


def test_what_a_drafter_is_checked_by_loads_no_torch() -> None:
    """It is the supervisor's process, which lives as long as the server."""
    check = f"check_folder('EAGLE3', Path('{DEMO}/eagle3'), Path('{DEMO}/target'))"
    loaded = loaded_by(f"from pathlib import Path\nfrom drafter_svc.model_folder import check_folder\n{check}")
    assert loaded & {"torch", "transformers", "numba"} == set()


def test_a_drafter_may_be_called_as_its_verifier(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--drafter", "name=verifier,algorithm=NGRAM")
    for service in supervised.values():
        invoke(*words(service))
    (drafter,), (verifier, _) = served["drafter"], served["verifier"]
    assert verifier.drafters == (DrafterEndpoint(name="verifier", address=drafter.address),)
    assert verifier.address != drafter.address


SEVENTEEN = tuple(word for i in range(17) for word in ("--drafter", f"name=d{i},algorithm=NGRAM"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SEVENTEEN, "--drafter: at most 16 drafters, got 17"),
        (("--drafter", "name=a,algorithm=NGRAM") * 2, "--drafter name: a is given twice"),
        (("--admin-api-key-file", "/nowhere/key"), "--admin-api-key-file: cannot read /nowhere/key: "),
        (("--request-timeout", "0"), "--request-timeout: expected more than 0.0, got 0.0"),
        (
            ("--drafter", "name=a,algorithm=NGRAM", "--speculative-algorithm", "NGRAM"),
            f"--speculative-algorithm beside --drafter, whose keys say the same: {KEYS}",
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
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *flags, *ports, "--drafter-placement", "in-process"])
    assert str(result.exception) == f"a drafter inside the verifier cannot have a comma in its model: {tmp_path}/a,b"
    assert supervised == {}


def test_a_port_in_use_is_noticed_before_anything_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        result = foretoken("serve", "./nowhere", "--port", free_port(), "--grpc-port", port)
    assert result.returncode == 2
    expected = f"foretoken: port {port} is in use; choose another with --grpc-port (make serve GRPC_PORT=...)\n"
    assert result.stderr == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve",), "Missing argument 'MODEL'"),
        (("serve", ".", "--tensor-parallel-size", "2"), "No such option: --tensor-parallel-size"),
        (("serve", ".", "--speculative-algorithm", "EAGLE9"), "'EAGLE9' is not"),
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


def loaded_by(code: str) -> set[str]:
    """The top-level modules that are loaded after ``code``."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


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
