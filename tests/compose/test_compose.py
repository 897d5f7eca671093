"""`docker compose up` for real: streams through the published port while containers die, and a clean `down`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compose.conftest import ROOT, SERVICES, Deployment, docker, wait_until

# Building the images is part of it.
pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(2400)]
# The demo's longest context, so that the stream outlives what happens to it.
LONG = {
    "model": "foretoken-demo",
    "prompt": "def read_json(path):\n",
    "max_tokens": 1800,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def up(deployment: Deployment) -> Iterator[Deployment]:
    deployment.compose("up", "-d")
    deployment.wait_healthy()
    deployment.wait_attached()
    yield deployment
    deployment.compose("down", "--volumes")


def stream(deployment: Deployment, salt: str, at_event: Callable[[], None] | None = None, event: int = 20) -> str:
    """The text of LONG. ``at_event`` is called once, after so many events. ``salt``: nothing cached is used."""
    text, usage, count = "", None, 0
    with httpx.stream(
        "POST", f"{deployment.url}/v1/completions", json=LONG | {"cache_salt": salt}, timeout=None, trust_env=False
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if payload == line or payload == "[DONE]":
                continue
            message: dict[str, Any] = json.loads(payload)
            assert "error" not in message, message
            text += "".join(choice["text"] for choice in message["choices"])
            usage = message.get("usage") or usage
            count += 1
            if count == event and at_event is not None:
                at_event()
    assert usage is not None and usage["completion_tokens"] == LONG["max_tokens"]
    return text


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> str:
    return stream(up, "undisturbed")


def test_both_folders_mean_the_same_project(deployment: Deployment) -> None:
    assert deployment.compose("config") == deployment.compose("config", folder=ROOT / "docker")


def test_the_text_comes_through_the_arena_of_the_other_container(up: Deployment, undisturbed: str) -> None:
    assert undisturbed
    assert up.drafter()["transport"] == "shared-memory"
    namespaces = {docker("exec", up.container(name), "readlink", "/proc/self/ns/pid") for name in SERVICES}
    assert len(namespaces) == 3


def test_the_gateway_has_no_torch(up: Deployment) -> None:
    script = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numba'))"
    assert docker("exec", up.container("gateway"), "python3", "-c", script) == "None None"


@pytest.mark.parametrize("service", SERVICES)
def test_containers_run_without_privileges(up: Deployment, service: str) -> None:
    script = "id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status; touch /new 2>&1 || true"
    identity, capabilities, privileges, written = docker("exec", up.container(service), "sh", "-c", script).splitlines()
    assert identity == "10001"
    assert (capabilities.split()[1], privileges.split()[1]) == ("0" * 16, "1")
    assert "Read-only file system" in written


def test_the_plan_keeps_to_the_containers_memory(up: Deployment) -> None:
    plan = docker("exec", up.container("verifier"), *"foretoken verifier /model --address unix:/x --dry-run".split())
    (available,) = [line.split()[1] for line in plan.splitlines() if line.split()[0] == "available"]
    assert float(available.replace(",", "")) < int(up.inspect("verifier", "{{.HostConfig.Memory}}")) / 2**20


def test_a_drafter_container_killed_in_mid_stream_changes_nothing(up: Deployment, undisturbed: str) -> None:
    attaches = up.drafter()["num_attaches"]
    assert stream(up, "drafter", lambda: docker_kill(up, "drafter")) == undisturbed
    # An engine takes `docker kill` for the user's wish: the restart policy does not apply.
    up.compose("up", "-d")
    up.wait_attached(more_than=attaches)


def test_a_drafter_that_crashes_comes_back_by_itself(up: Deployment, undisturbed: str) -> None:
    attaches = up.drafter()["num_attaches"]
    assert stream(up, "crash", lambda: up.crash("drafter")) == undisturbed
    up.wait_attached(more_than=attaches)
    up.wait_healthy()


def test_a_verifier_that_crashes_in_mid_stream_resumes(up: Deployment, undisturbed: str) -> None:
    def restarts() -> int:
        return int(up.inspect("verifier", "{{.RestartCount}}"))

    before = restarts()
    assert stream(up, "verifier", lambda: up.crash("verifier")) == undisturbed
    assert restarts() == before + 1
    up.wait_healthy()
    up.wait_attached()


def test_a_verifier_container_killed_in_mid_stream_resumes_when_it_is_started(up: Deployment, undisturbed: str) -> None:
    def kill_and_start() -> None:
        docker_kill(up, "verifier")
        up.compose("up", "-d")

    assert stream(up, "killed", kill_and_start) == undisturbed
    up.wait_healthy()
    up.wait_attached()


def test_it_starts_without_a_drafter(up: Deployment, undisturbed: str) -> None:
    up.compose("stop")
    assert {service: exit_code(up, service) for service in SERVICES} == dict.fromkeys(SERVICES, "0")
    up.compose("up", "-d", "gateway")
    wait_until(lambda: up.ready().get("status") == "ready", "gateway and verifier are ready")
    assert up.drafter()["state"] != "attached"
    assert stream(up, "alone") == undisturbed
    up.compose("up", "-d")
    up.wait_attached()


def test_a_running_stream_is_finished_by_a_stop(up: Deployment, undisturbed: str) -> None:
    up.wait_healthy()
    stopped: list[str] = []
    # SIGTERM and no wait: the stream goes on while its services drain.
    text = stream(up, "stop", lambda: stopped.extend(docker("kill", "-s", "TERM", up.container(s)) for s in ORDER))
    assert text == undisturbed
    for service in ORDER:
        wait_until(lambda name=service: up.inspect(name, "{{.State.Running}}") == "false", f"{service} has ended")
    assert {service: exit_code(up, service) for service in ORDER} == dict.fromkeys(ORDER, "0")
    up.compose("up", "-d")
    up.wait_healthy()


ORDER = ("gateway", "verifier")


def test_down_leaves_only_the_volumes_until_they_are_asked_for(up: Deployment) -> None:
    def left(kind: str, *command: str) -> set[str]:
        label = f"label=com.docker.compose.project={up.project}"
        names = docker(kind, *command, "--filter", label, "--format", "{{.Name}}" if kind != "ps" else "{{.Names}}")
        return {name.removeprefix(f"{up.project}_") for name in names.split()}

    up.compose("down")
    assert left("ps", "-a") == left("network", "ls") == set()
    assert left("volume", "ls") == {"sockets", "verifier-kernels", "drafter-kernels"}
    up.compose("down", "--volumes")
    assert left("volume", "ls") == set()


def docker_kill(deployment: Deployment, service: str) -> None:
    docker("kill", "-s", "KILL", deployment.container(service))


def exit_code(deployment: Deployment, service: str) -> str:
    containers = docker(
        *("ps", "-a", "-q", "--filter", f"label=com.docker.compose.project={deployment.project}"),
        *("--filter", f"label=com.docker.compose.service={service}"),
    )
    return docker("inspect", "--format", "{{.State.ExitCode}}", containers)
