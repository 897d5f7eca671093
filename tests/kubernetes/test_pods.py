"""The rendered command lines and probes, run as processes of
this machine in the order of their pods.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken.free_ports import free_ports
from tests.integration.conftest import build_checkpoint
from tests.integration.stack import ENVIRONMENT
from tests.kubernetes.chart import LEAST, POOL, Manifest, containers, pods, render

pytestmark = pytest.mark.kubernetes
TOKEN = secrets.token_urlsafe(32)


class Machine:
    """Runs containers as processes, with a folder in place of their volumes and free ports."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        (folder / "run").mkdir()
        self.log = folder / "log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port, self.grpc_port, self.verifier_port, *events = free_ports(5)
        self._words = {
            "dns://r-foretoken-verifier.ns.svc:50052": f"127.0.0.1:{self.verifier_port}",
            "0.0.0.0:50052": f"127.0.0.1:{self.verifier_port}",
            "0.0.0.0": "127.0.0.1",
            "=50051": f"={self.grpc_port}",
            "port=8000": f"port={self.port}",
            "/run/foretoken": str(folder / "run"),
            "/etc/foretoken": str(folder / "etc"),
            "/model": str(checkpoint),
            "$(POD_IP)": "10.0.0.1",
            "tcp://*:5557": f"tcp://127.0.0.1:{events[0]}",
            "tcp://*:5558": f"tcp://127.0.0.1:{events[1]}",
        }

    def start(self, name: str, container: Manifest) -> None:
        command = [sys.executable, "-P", "-m", "foretoken", *self._here(container["args"])]
        with self.log.open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)

    def passes(self, probe: Manifest) -> bool:
        """Ask once, as a kubelet does."""
        if "exec" in probe:
            words = self._here(probe["exec"]["command"])[1:]
            command = [sys.executable, "-P", "-m", "foretoken", *words]
            return subprocess.run(command, env=ENVIRONMENT, capture_output=True).returncode == 0
        port = {50051: self.grpc_port, 50052: self.verifier_port}[probe["grpc"]["port"]]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            try:
                reply: Any = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def wait(self, name: str, probe: Manifest) -> None:
        while not self.passes(probe):
            assert self.processes[name].poll() is None, self.log.read_text()
            time.sleep(0.1)

    def end(self, name: str, seconds: float) -> None:
        """End a container as Kubernetes does; it must not need to be killed."""
        process = self.processes[name]
        process.terminate()
        assert process.wait(timeout=seconds) == 0, self.log.read_text()

    def _here(self, words: list[str]) -> list[str]:
        found = []
        for word in words:
            for there, here in self._words.items():
                word = word.replace(there, here)
            found.append(word)
        return found


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    (folder / "etc" / "link-token").mkdir(parents=True)
    (folder / "etc" / "link-token" / "token").write_text(TOKEN)
    machine = Machine(folder, build_checkpoint(folder / "tiny"))
    try:
        yield machine
    finally:
        for process in machine.processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("routing", ["gateways", "llm-d"])
def test_the_rendered_pods_start_serve_and_end(tmp_path: Path, routing: str) -> None:
    values = LEAST | {"access": {"insecure": True}} if routing == "gateways" else POOL
    of = dict(pods(render(values)))
    with machine(tmp_path) as here:
        # Pods of one kind at a time: sidecars first, each one's start awaited
        # where it has a probe for that.
        parts = [(name, part, pod) for pod in of.values() for name, part in containers(pod).items() if "args" in part]
        parts.sort(key=lambda part: ("drafter" not in part[0], part[0] != "verifier"))
        assert [name for name, *_ in parts] == ["drafter-ngram", "verifier", "gateway"]
        for name, part, _ in parts:
            here.start(name, part)
            if "startupProbe" in part:
                here.wait(name, part["startupProbe"])
        for name, part, _ in parts:
            for kind in ("livenessProbe", "readinessProbe"):
                if kind in part:
                    here.wait(name, part[kind])
        with httpx.Client(base_url=f"http://127.0.0.1:{here.port}", trust_env=False, timeout=None) as http:
            answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "for i in", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            metrics = http.get("/metrics").text
            assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in metrics
            drafters = http.get("/ready").json()["verifiers"][0]["drafters"]
            assert [drafter["name"] for drafter in drafters] == ["ngram"]
        for name, part, pod in reversed(parts):
            here.end(name, pod["spec"]["terminationGracePeriodSeconds"])
            if "readinessProbe" in part:
                assert not here.passes(part["readinessProbe"])
