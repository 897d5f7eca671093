"""``foretoken serve`` starts services with their flags, drafters in their places, MPS clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.config import DrafterSettings
from drafter_svc.ngram.settings import NgramSettings
from foretoken.config import build
from foretoken.errors import ConfigError
from foretoken.mps import PIPES
from foretoken.probes import GatewayProbe
from foretoken.service import Service
from foretoken.stack import GATEWAY_DRAIN_S
from gateway.config import GatewaySettings
from tests.support import fake_mps
from tests.support.command_line import foretoken, free_port, invoke, serve, words
from verifier_svc.config import DrafterEndpoint, VerifierSettings

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
HEAD = ("--drafter", "name=head,algorithm=EAGLE3,model=.", "--drafter", "name=ngram,algorithm=NGRAM")
NGRAM_SETTINGS = NgramSettings(
    min_match_window_size=2,
    max_match_window_size=5,
    min_bfs_breadth=2,
    max_bfs_breadth=3,
    capacity=4096,
    order="frequency",
)


def test_serve_starts_drafter_verifier_and_gateway_with_its_flags(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The machine seems to have a GPU, as some of the flags need one.
    monkeypatch.setattr("foretoken.mps.DRIVER", tmp_path)
    serve(str(tmp_path), *ONE_OF_EACH, *NGRAM, "--drafter-placement", "process")
    assert list(supervised) == ["drafter ngram", "verifier", "gateway"]
    assert [service.required for service in supervised.values()] == [False, True, True]
    for service in supervised.values():
        invoke(*words(service))
    (drafter,) = served["drafter"]
    verifier, in_process = served["verifier"]
    (gateway,) = served["gateway"]
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
    assert (gateway.model, gateway.served_model_name, gateway.verifiers) == (tmp_path, "demo", (verifier.address,))
    assert (gateway.request_timeout_s, gateway.drain_timeout_s) == (30, GATEWAY_DRAIN_S)
    assert verifier.address.startswith("unix:/") and verifier.address != drafter.address


@pytest.mark.parametrize(("num_cores", "num_workers"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_gateway_workers_follow_the_cores(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    num_workers: int,
) -> None:
    """By default there are as many as the cores that may be used allow; one is no worker."""
    spawned: list[GatewaySettings] = []
    monkeypatch.setattr("gateway.workers.run", lambda settings, extra: spawned.append(settings) or 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    for flags in ((), ("--gateway-workers", "auto")):
        serve(str(tmp_path), *flags, "--speculative-algorithm", "NONE")
        invoke(*words(supervised["gateway"]))
        (gateway,) = spawned or served["gateway"][:1]
        assert (gateway.num_workers, len(spawned)) == (num_workers, num_workers > 1)
        spawned.clear()


def test_auto_stands_for_a_number_that_the_verifier_chooses(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('chunked-prefill-size = "auto"')
    serve(str(tmp_path), "--max-running-requests", "auto", "--config", str(file))
    invoke(*words(supervised["verifier"]))
    verifier, _ = served["verifier"]
    assert (verifier.max_running_requests, verifier.chunked_prefill_size) == (0, 0)
    assert "'many' is not a valid integer" in foretoken("serve", str(tmp_path), "--max-running-requests", "many").stderr


def test_queues_hold_a_load_test() -> None:
    """Two thousand requests at once are none too many for a gateway and its verifier."""
    fields = (
        GatewaySettings.model_fields["max_concurrent_requests"],
        VerifierSettings.model_fields["max_queued_requests"],
    )
    assert all(field.default >= 2048 for field in fields)


@pytest.mark.parametrize(("value", "expected"), [("0", "at least 1"), ("65", "at most 64"), ("many", "a whole number")])
def test_a_wrong_number_of_gateway_workers_is_refused(value: str, expected: str) -> None:
    needed = {"model": "m", "served_model_name": "m", "verifiers": ["unix:/v"]}
    with pytest.raises(ConfigError, match=f"--gateway-workers: expected {expected}, got '{value}'"):
        build(GatewaySettings, needed | {"gateway_workers": value})


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
    (verifier, _), (gateway,) = served["verifier"], spawned
    assert verifier.otlp_traces_endpoint == gateway.otlp_traces_endpoint == endpoint
    assert (gateway.gateway_workers, gateway.vllm_metric_names, gateway.worker_socket) == (3, True, None)
    # The supervisor asks where the gateway answers.
    probe = supervised["gateway"].probe
    assert isinstance(probe, GatewayProbe) and probe.liveness_socket == gateway.liveness_socket
    assert supervised["gateway"].max_stall_s == 30.0
    assert "gateway" not in served
    # A worker is a gateway like any other.
    invoke(*words(supervised["gateway"]), "--worker-socket", "/run/x/worker-0.sock")
    assert served["gateway"][0] == gateway.model_copy(update={"worker_socket": Path("/run/x/worker-0.sock")})
    # OpenTelemetry's own variable works like the flag.
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


@pytest.mark.parametrize(
    ("placement", "outside"),
    [("auto", ["head"]), ("process", ["head", "ngram"]), ("in-process", [])],
)
def test_only_ngrams_run_in_the_verifiers_process_unless_told_otherwise(
    tmp_path: Path, supervised: dict[str, Service], placement: str, outside: list[str]
) -> None:
    flags = () if placement == "auto" else ("--drafter-placement", placement)
    serve(str(tmp_path), *HEAD, *flags)
    assert list(supervised) == [*(f"drafter {name}" for name in outside), "verifier", "gateway"]


def test_a_drafter_may_say_itself_where_it_runs(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    outside = ("--drafter", "name=head,algorithm=EAGLE3,model=.,placement=process")
    inside = ("--drafter", "name=ngram,algorithm=NGRAM,placement=in-process")
    serve(str(tmp_path), *outside, *inside, "--drafter-placement", "process")
    assert list(supervised) == ["drafter head", "verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    verifier, in_process = served["verifier"]
    assert [drafter.name for drafter in verifier.drafters] == ["head"]
    assert in_process == {"ngram": DrafterSettings(name="ngram", address="unix:/none")}
    supervised.clear()
    serve(str(tmp_path), *outside, *inside[:1], "name=ngram,algorithm=NGRAM", "--drafter-placement", "in-process")
    assert list(supervised) == ["drafter head", "verifier", "gateway"]


def test_without_an_algorithm_there_is_no_drafter(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--speculative-algorithm", "NONE")
    assert list(supervised) == ["verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    assert served["verifier"][0].drafters == ()
    assert served["verifier"][1] == {}


@pytest.mark.parametrize(
    ("word", "algorithm"), [("eagle3", "EAGLE3"), ("Eagle2", "EAGLE"), ("mtp", "MTP"), ("nextn", "MTP")]
)
def test_an_algorithm_may_be_in_any_case(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service], word: str, algorithm: str
) -> None:
    """This holds for every flag, and for SGLang's names too; our name is handed on."""
    model = () if algorithm == "MTP" else ("--speculative-draft-model-path", str(tmp_path))
    serve(str(tmp_path), "--speculative-algorithm", word, *model)
    own = supervised[f"drafter {algorithm.lower()}"]
    invoke(*words(own))
    assert served["drafter"][0].algorithm == algorithm
    invoke("drafter", "--address", "unix:/d", "--algorithm", word, *model)
    assert served["drafter"][0].algorithm == algorithm
    supervised.clear()
    key = f",model={tmp_path}" if model else ""
    serve(str(tmp_path), "--drafter", f"name=a,algorithm={word}{key}")
    command = words(supervised["drafter a"])
    assert command[command.index("--algorithm") + 1] == algorithm


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


def test_a_drafter_may_be_called_as_its_verifier(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--drafter", "name=verifier,algorithm=NGRAM,placement=process")
    for service in supervised.values():
        invoke(*words(service))
    (drafter,), (verifier, _) = served["drafter"], served["verifier"]
    assert verifier.drafters == (DrafterEndpoint(name="verifier", address=drafter.address),)
    assert verifier.address != drafter.address


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a driver and MPS's control program on PATH; return the program's journal."""
    monkeypatch.setattr("foretoken.mps.DRIVER", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    return fake_mps.write(tmp_path)


def test_verifier_and_model_drafters_are_clients_of_one_mps_daemon(
    tmp_path: Path, supervised: dict[str, Service], journal: Path
) -> None:
    serve(str(tmp_path), *HEAD, "--drafter", "name=outside,algorithm=NGRAM,placement=process")
    verifier, head = supervised["verifier"], supervised["drafter head"]
    assert verifier.environment == head.environment and PIPES in verifier.environment
    assert verifier.shares_faults and head.shares_faults and verifier.before_kill
    for other in ("drafter outside", "gateway"):
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
    """A run that only prints the plan refuses it too."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    ports = ("--port", free_port(), "--grpc-port", free_port())
    result = foretoken("serve", str(tmp_path), "--device", "cpu", "--mps", "on", *ports, *plan)
    expected = "foretoken: --mps on: models do not run on an NVIDIA GPU here\n"
    assert (result.returncode, result.stderr) == (2, expected)


def test_the_demo_model_is_served_with_its_drafters(
    tmp_path: Path,
    served: dict[str, tuple[Any, ...]],
    supervised: dict[str, Service],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    invoke("serve", "demo", *ports())
    assert list(supervised) == ["drafter eagle3", "verifier", "gateway"]
    for service in supervised.values():
        invoke(*words(service))
    (drafter,) = served["drafter"]
    verifier, in_process = served["verifier"]
    assert drafter.algorithm == "EAGLE3" and drafter.speculative_draft_model_path.name == "eagle3"
    assert drafter.speculative_token_map.is_file()
    assert list(in_process) == ["ngram"]
    assert (verifier.model.name, verifier.served_model_name) == ("target", "foretoken-demo")


def test_named_drafters_take_the_place_of_the_demos(
    served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    invoke("serve", "demo", *ports(), "--speculative-algorithm", "NONE")
    assert list(supervised) == ["verifier", "gateway"]
    supervised.clear()
    # Its head needs no --speculative-draft-model-path.
    invoke("serve", "demo", *ports(), "--speculative-algorithm", "EAGLE3")
    assert list(supervised) == ["drafter eagle3", "verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    assert served["verifier"][1] == {}
    supervised.clear()
    invoke("serve", "demo", *ports(), "--drafter", "name=mine,algorithm=NGRAM")
    assert list(supervised) == ["verifier", "gateway"]
    invoke(*words(supervised["verifier"]))
    verifier, in_process = served["verifier"]
    assert (verifier.drafters, list(in_process)) == ((), ["mine"])


def ports() -> tuple[str, ...]:
    return ("--port", free_port(), "--grpc-port", free_port())
