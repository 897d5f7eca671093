"""The images' sources, as far as they can be checked without a container engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


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
        # Prometheus and Grafana are not built here.
        if "profiles" in service:
            continue
        arguments = service["build"]["args"]
        for name, value in defaults.items():
            assert arguments[name].lstrip("${").rstrip("}").replace(":-", "-").split("-", 1) == [name, value]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"] and service["pids_limit"]
    is_watching = service.get("profiles") == ["observability"]
    assert ("ports" in service) == (name == "gateway" or is_watching) == (service.get("network_mode") != "none")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_nothing_waits_for_a_drafter() -> None:
    assert all("drafter" not in service.get("depends_on", ()) for service in SERVICES.values())


def test_prometheus_and_grafana_start_only_with_the_profile() -> None:
    watching = {name for name, service in SERVICES.items() if service.get("profiles")}
    assert watching == {"prometheus", "grafana"}
    folder = ROOT / "docker"
    mounted = [volume.split(":")[0] for name in watching for volume in SERVICES[name]["volumes"]]
    assert all((folder / path).exists() for path in mounted if path.startswith("./"))
    source = yaml.safe_load((folder / "observability/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    config = yaml.safe_load((folder / "observability/prometheus.yaml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    # The gateway answers requests for this name only.
    assert target.split(":")[0] in "".join(SERVICES["gateway"]["command"])
