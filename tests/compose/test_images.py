"""The images' sources, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.commands.options import settings_of_command

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PUBLISHED = {"prometheus", "grafana", "jaeger"}
CPU = {"gateway", "verifier", "drafter"}
GPU = {"gateway-gpu", "mps", "verifier-gpu", "drafter-gpu"}
WATCHING = PUBLISHED | {"otel-socket", "otel-collector"}
PROFILES = {"cpu": CPU, "observability": CPU | WATCHING, "gpu": GPU, "gpu-observability": GPU | WATCHING}


def requirements(*without: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "docker" / "requirements.py"
    return subprocess.run([sys.executable, script, *without], cwd=ROOT, capture_output=True, text=True)


def test_the_gateway_needs_everything_but_what_is_named() -> None:
    everything = requirements().stdout.splitlines()
    rest = requirements("torch", "numba").stdout.splitlines()
    assert {line.split(">")[0] for line in set(everything) - set(rest)} == {"torch", "numba"}
    assert [line for line in everything if line in rest] == rest


def test_a_name_that_is_no_dependency_is_refused() -> None:
    result = requirements("torch", "tensorflow")
    assert result.returncode == 1
    assert result.stderr == "not among the dependencies of pyproject.toml: tensorflow\n"


def test_docker_and_compose_have_the_same_defaults() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    defaults = dict(
        line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG ") and "=" in line
    )
    assert set(defaults) == {"BASE_IMAGE", "TORCH_INDEX"}
    for service in SERVICES.values():
        for name, value in defaults.items() if "build" in service else ():
            given = service["build"]["args"][name]
            assert given.lstrip("${").rstrip("}").replace(":-", "-").split("-", 1) == [name, value]


def test_images_of_others_are_pinned_by_digest() -> None:
    defaults = [service["image"] for service in SERVICES.values() if not service["image"].startswith("foretoken-")]
    defaults.append(
        next(line for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines() if "BASE_IMAGE=" in line)
    )
    assert len(defaults) == 5
    for default in defaults:
        assert re.search(r"[\w.-]:[\w.-]+@sha256:[0-9a-f]{64}}?$", default), default


def test_compose_builds_targets_that_the_dockerfile_has() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    assert len(set(stages)) == len(stages)
    built = {service["image"]: service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert built == {f"foretoken-{name}": name for name in ("gateway", "engine", "engine-gpu")}
    assert set(built.values()) <= set(stages)
    # The old builder runs all stages above its target: a GPU's packages must not be among them.
    assert stages.index("engine") < stages.index("engine-gpu-packages")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"] and service["pids_limit"]
    assert service["environment"]["TINI_VERBOSITY"] == "2"
    has_network = name in {"gateway", "gateway-gpu", "otel-collector"} | PUBLISHED
    assert (service.get("network_mode") != "none") == has_network
    assert ("ports" in service) == (name in {"gateway", "gateway-gpu"} | PUBLISHED)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", ["gateway", "gateway-gpu"])
def test_a_gateway_on_all_addresses_has_keys_or_says_it_has_none(name: str) -> None:
    """Without one of these flags it refuses to start on an address that others reach."""
    command = SERVICES[name]["command"]
    assert "--host=0.0.0.0" in command
    flags = {word.split("=")[0] for word in command}
    assert flags & {"--insecure", "--api-key", "--api-key-file"}
    # Only loopback may reach a gateway without keys.
    assert "--insecure" not in flags or all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_what_its_services_depend_on_and_one_service_at_each_socket(profile: str) -> None:
    services = {name: service for name, service in SERVICES.items() if profile in service["profiles"]}
    assert services.keys() == PROFILES[profile]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
    commands = [word for service in services.values() for word in service.get("command", ())]
    for socket in ("verifier", "drafter"):
        assert commands.count(f"--address=unix:/run/foretoken/{socket}.sock") == 1


def test_commands_have_flags_that_their_services_take() -> None:
    commands = [service["command"] for service in SERVICES.values() if service.get("command") and "build" in service]
    assert [command[0] for command in commands] == ["gateway", "verifier", "drafter", "gateway", "verifier", "drafter"]
    for service, *words in commands:
        known = {setting.flag for setting in settings_of_command(service)}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_nothing_waits_for_a_drafter() -> None:
    assert all(
        not name.startswith("drafter") for service in SERVICES.values() for name in service.get("depends_on", ())
    )


def test_without_a_flag_the_profile_is_cpu() -> None:
    for folder in (ROOT, ROOT / "docker"):
        assert "COMPOSE_PROFILES=cpu" in (folder / ".env").read_text().splitlines()


def test_services_on_a_gpu_share_its_device_and_what_mps_needs() -> None:
    """Never run: no machine of ours has both a GPU and a container engine."""
    on_a_gpu = {name: service for name, service in SERVICES.items() if "deploy" in service}
    assert on_a_gpu.keys() == {"mps", "verifier-gpu", "drafter-gpu"}
    devices = [service["deploy"]["resources"]["reservations"]["devices"] for service in on_a_gpu.values()]
    assert devices == [[{"driver": "nvidia", "device_ids": ["${GPU:-0}"], "capabilities": ["gpu"]}]] * 3
    for name, service in on_a_gpu.items():
        assert service["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
        assert {"mps:/run/mps", "gpu-memory:/dev/shm"} <= set(service["volumes"])
        # Descriptors of the arena's memory cross a socket, so no namespace is shared.
        assert not {"pid", "ipc"} & service.keys()
        if name != "mps":
            assert "sockets:/run/foretoken" in service["volumes"]
            assert service["depends_on"] == {"mps": {"condition": "service_healthy"}}
    assert SERVICES["gateway-gpu"]["networks"] == {"default": {"aliases": ["gateway"]}}


def test_what_watches_starts_only_with_its_profiles_and_finds_its_files() -> None:
    watching = PROFILES["observability"] & PROFILES["gpu-observability"]
    folder = ROOT / "docker"
    mounted = [volume.split(":")[0] for name in watching for volume in SERVICES[name].get("volumes", ())]
    assert all((folder / path).exists() for path in mounted if path.startswith("./"))
    source = yaml.safe_load((folder / "observability/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    config = yaml.safe_load((folder / "observability/prometheus.yaml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    # The gateway answers requests for this name only.
    assert target.split(":")[0] in "".join(SERVICES["gateway"]["command"])
