"""A real `docker compose up`: streams survive while containers die, and `down` is clean."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from tests.compose.conftest import ROOT, SERVICES, Deployment, docker, wait_until
from tests.compose.test_images import PROFILES

# Building the images is part of it.
pytestmark = [pytest.mark.compose, pytest.mark.slow, pytest.mark.timeout(2400)]
# Choices of nearly the demo's whole context: the stream outlasts the faults.
LONG: dict[str, Any] = {
    "model": "foretoken-demo",
    "prompt": "def read_json(path):\n",
    "max_tokens": 1800,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "n": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
}
EVENTS_BEFORE = 20
# The stream that a stop lets finish takes about so long; the services drain for twenty seconds.
STOPPED_STREAM_S = 8.0


@pytest.fixture(scope="module")
def up(deployment: Deployment) -> Iterator[Deployment]:
    deployment.compose("up", "-d")
    deployment.wait_healthy()
    deployment.wait_attached()
    yield deployment
    deployment.compose("down", "--volumes")


@dataclass(frozen=True)
class Answer:
    """The texts of LONG's choices, and how many of these were resumed."""

    texts: tuple[str, ...]
    num_resumes: int


def stream(
    deployment: Deployment,
    salt: str,
    interrupt: Callable[[], object] | None = None,
    *,
    max_tokens: int = LONG["max_tokens"],
) -> Answer:
    """Return LONG's answer; call ``interrupt`` once, after some events; ``salt`` avoids caches."""
    body = LONG | {"cache_salt": salt, "max_tokens": max_tokens}
    texts, usage, count = [""] * LONG["n"], None, 0
    url = f"{deployment.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=None, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if payload in (line, "[DONE]"):
                continue
            message: dict[str, Any] = json.loads(payload)
            assert "error" not in message, message
            for choice in message["choices"]:
                texts[choice["index"]] += choice["text"]
            usage = message.get("usage") or usage
            count += 1
            if count == EVENTS_BEFORE and interrupt is not None:
                interrupt()
                # Otherwise the interruption was too late to prove anything.
                assert deployment.num_requests() == 1
    assert usage is not None and usage["completion_tokens"] == LONG["n"] * max_tokens
    return Answer(tuple(texts), deployment.num_resumes(message["id"]))


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> tuple[str, ...]:
    answer = stream(up, "undisturbed")
    assert all(answer.texts) and answer.num_resumes == 0
    return answer.texts


def test_both_folders_mean_the_same_project(deployment: Deployment) -> None:
    assert deployment.compose("config") == deployment.compose("config", folder=ROOT / "docker")


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_reads_each_profile(deployment: Deployment, profile: str) -> None:
    # Version 1 lists the services of all profiles.
    found = set(deployment.compose("--profile", profile, "config", "--services").split())
    assert found >= PROFILES[profile]


def test_the_text_comes_through_the_arena_of_the_other_container(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    assert len(undisturbed) == LONG["n"]
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
    plan = docker(
        "exec", up.container("verifier"), *["foretoken", "verifier", "/model", "--address", "unix:/x", "--dry-run"]
    )
    (available,) = [line.split()[1] for line in plan.splitlines() if line.split()[0] == "available"]
    assert float(available.replace(",", "")) < int(up.inspect("verifier", "{{.HostConfig.Memory}}")) / 2**20


def test_a_drafter_container_killed_in_mid_stream_changes_nothing(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    attaches = up.drafter()["num_attaches"]
    assert up.ended("drafter") == "running, has not ended"
    assert stream(up, "drafter killed", lambda: up.kill("drafter")) == Answer(undisturbed, 0)
    killed = "killed from outside (exit code 137); nobody starts it again: docker compose up -d"
    assert up.ended("drafter") == killed
    up.compose("up", "-d")
    up.wait_attached(more_than=attaches)


def test_a_drafter_that_crashes_comes_back_by_itself(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    attaches = up.drafter()["num_attaches"]
    assert stream(up, "drafter crashed", lambda: up.crash("drafter")) == Answer(undisturbed, 0)
    up.wait_attached(more_than=attaches)
    up.wait_healthy()
    assert up.ended("drafter").startswith("running, restarted 1 times; ended with signal 'Killed'; ")


def test_a_stream_is_resumed_on_a_verifier_that_crashed(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    assert stream(up, "verifier crashed", lambda: up.crash("verifier")) == Answer(undisturbed, LONG["n"])
    assert up.inspect("verifier", "{{.RestartCount}}") == "1"
    up.wait_healthy()
    up.wait_attached()


def test_a_stream_waits_for_a_killed_verifier_container_to_be_started(
    up: Deployment, undisturbed: tuple[str, ...]
) -> None:
    def kill_and_start() -> None:
        up.kill("verifier")
        up.compose("up", "-d")

    assert stream(up, "verifier killed", kill_and_start) == Answer(undisturbed, LONG["n"])
    up.wait_healthy()
    up.wait_attached()


def test_it_starts_without_a_drafter(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    up.compose("stop")
    assert [up.inspect(service, "{{.State.ExitCode}}") for service in SERVICES] == ["0"] * len(SERVICES)
    asked = "ended with status '0'; it was asked to stop; start it: docker compose up -d"
    assert [up.ended(service) for service in SERVICES] == [asked] * len(SERVICES)
    up.compose("up", "-d", "gateway")
    wait_until(lambda: up.ready().get("status") == "ready", "gateway and verifier are ready")
    assert up.drafter()["state"] != "attached"
    assert stream(up, "no drafter") == Answer(undisturbed, 0)
    up.compose("up", "-d")
    up.wait_attached()


def test_a_stop_lets_a_running_stream_finish(up: Deployment, undisturbed: tuple[str, ...]) -> None:
    up.wait_healthy()
    began = time.monotonic()
    assert stream(up, "timed").texts == undisturbed
    # Short enough to leave a drain much time on a busy machine, long enough for a stop to meet it.
    max_tokens = min(round(LONG["max_tokens"] * STOPPED_STREAM_S / (time.monotonic() - began)), LONG["max_tokens"])
    expected = stream(up, "shorter", max_tokens=max_tokens)
    stops: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        stops.append(subprocess.Popen([*up.command, "stop"], cwd=ROOT, env=up.environment))
        # Readiness flips first.
        wait_until(lambda: up.ready().get("status") != "ready", "the gateway drains")

    assert stream(up, "stopped", stop, max_tokens=max_tokens) == expected
    assert stops[0].wait() == 0
    assert [up.inspect(service, "{{.State.ExitCode}}") for service in SERVICES] == ["0"] * len(SERVICES)
    up.compose("up", "-d")
    up.wait_healthy()


def test_down_leaves_only_the_volumes_until_they_are_asked_for(up: Deployment) -> None:
    def left(kind: str, *command: str) -> set[str]:
        label = f"label=com.docker.compose.project={up.project}"
        names = docker(kind, *command, "--filter", label, "--format", "{{.Name}}" if kind != "ps" else "{{.Names}}")
        return {name.removeprefix(f"{up.project}_") for name in names.split()}

    up.compose("down")
    assert left("ps", "-a") == left("network", "ls") == set()
    # Compose 1 makes the volumes of profiles that are off, too.
    volumes: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["volumes"]
    of_profiles = volumes.keys() - {"sockets", "telemetry", "verifier-kernels", "drafter-kernels"}
    assert left("volume", "ls") - of_profiles == volumes.keys() - of_profiles
    up.compose("down", "--volumes")
    assert left("volume", "ls") == set()
