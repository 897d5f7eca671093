"""Real containers, built, started and stopped with the installed Compose. Only with --compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.free_ports import free_ports

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "verifier", "drafter")
# Bounds every wait; only a broken container reaches it.
HANG_S = 240.0


def compose_command() -> list[str]:
    """Return Compose 2 if docker has it, else version 1's program; skip the test without both."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("needs Docker Compose")


def check_engine() -> None:
    """Skip the test, with docker's own words, if no container engine answers."""
    if shutil.which("docker") is None:
        pytest.skip("needs a container engine: no docker here")
    answer = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True)
    if answer.returncode != 0:
        pytest.skip(f"needs a container engine: {answer.stderr.strip()}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S:g} s: {what}"
        time.sleep(0.2)


def docker(*arguments: str, stderr: int = subprocess.PIPE) -> str:
    """Run docker; return its standard output, with standard error if ``subprocess.STDOUT``."""
    command = ["docker", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True).stdout.strip()


@dataclass(frozen=True)
class Deployment:
    """A Compose project: `docker compose` without flags, at the repository root or in docker/."""

    command: list[str]
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['PORT']}"

    @property
    def project(self) -> str:
        return self.environment["COMPOSE_PROJECT_NAME"]

    def compose(self, *arguments: str, folder: Path = ROOT) -> str:
        """Run Compose; return its standard output. A failure shows everything that it wrote."""
        result = subprocess.run(
            [*self.command, *arguments], cwd=folder, env=self.environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{arguments}: {result.stdout}\n{result.stderr}"
        return result.stdout

    def container(self, service: str) -> str:
        """Return the container's id, running or not, where versions of `compose ps` differ."""
        return docker(
            *("ps", "-a", "-q", "--no-trunc", "--filter", f"label=com.docker.compose.project={self.project}"),
            *("--filter", f"label=com.docker.compose.service={service}"),
        )

    def inspect(self, service: str, template: str) -> str:
        return docker("inspect", "--format", template, self.container(service))

    def is_healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Running}} {{.State.Health.Status}}") == "true healthy"

    def wait_healthy(self) -> None:
        for service in SERVICES:
            wait_until(lambda name=service: self.is_healthy(name), f"{service} is healthy")

    def kill(self, service: str) -> None:
        """Kill the container. The engine thinks that the user wants that: no restart follows."""
        docker("kill", "-s", "KILL", self.container(service))

    def crash(self, service: str) -> None:
        """Kill every process in the container except its init, which ends with them."""
        subprocess.run(
            ["docker", "exec", self.container(service), "sh", "-c", "kill -9 -1"], check=False, capture_output=True
        )

    def ended(self, service: str) -> str:
        """Return what docker/ended.sh says of a service."""
        said = subprocess.run(
            ["sh", ROOT / "docker" / "ended.sh", self.project], check=True, capture_output=True, text=True
        ).stdout
        (line,) = [line for line in said.splitlines() if line.startswith(f"{service}: ")]
        return line.removeprefix(f"{service}: ")

    def ready(self) -> dict[str, Any]:
        """Return the answer of /ready, empty while nothing listens."""
        try:
            answer: dict[str, Any] = httpx.get(f"{self.url}/ready", timeout=HANG_S, trust_env=False).json()
        except httpx.TransportError:
            return {}
        return answer

    def num_requests(self) -> int:
        """Return the number of requests in the gateway now."""
        lines = httpx.get(f"{self.url}/metrics", timeout=HANG_S, trust_env=False).text.splitlines()
        (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith("foretoken_gateway_num_requests{")]
        return int(float(value))

    def num_resumes(self, request_id: str) -> int:
        """Return the number from the gateway's log line, written soon after the stream's end."""
        resumes: list[int] = []

        def logged() -> bool:
            lines = docker("logs", self.container("gateway"), stderr=subprocess.STDOUT).splitlines()
            entries = [json.loads(line) for line in lines if line.startswith("{")]
            resumes.extend(entry["resumes"] for entry in entries if entry.get("request_id") == request_id)
            return bool(resumes)

        wait_until(logged, f"{request_id} is logged")
        return resumes[0]

    def drafter(self) -> dict[str, Any]:
        """Return /ready's entry of the one drafter; empty while there is no verifier."""
        verifiers: list[dict[str, Any]] = self.ready().get("verifiers", [])
        drafters = [drafter for verifier in verifiers for drafter in verifier["drafters"]]
        return drafters[0] if drafters else {}

    def wait_attached(self, *, more_than: int = 0) -> None:
        def attached() -> bool:
            drafter = self.drafter()
            return drafter.get("state") == "attached" and drafter["num_attaches"] > more_than

        wait_until(attached, "the drafter is attached")


@pytest.fixture(scope="session")
def deployment() -> Iterator[Deployment]:
    """Build the images, start nothing, and remove everything at the end."""
    check_engine()
    environment = dict(os.environ)
    environment |= {"COMPOSE_PROJECT_NAME": f"foretoken-test-{os.getpid()}"}
    port, grpc_port = free_ports(2)
    environment |= {"PORT": str(port), "GRPC_PORT": str(grpc_port)}
    deployment = Deployment(compose_command(), environment)
    deployment.compose("build")
    try:
        yield deployment
    finally:
        deployment.compose("down", "--volumes", "--timeout", "5")
