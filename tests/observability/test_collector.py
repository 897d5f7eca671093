"""Spans go through a collector that is not ours; and the profile's
own collector, as far as it can be checked.

The container `otel-collector` was not run here, for want of its image. Rotel is another collector
that speaks OTLP: it decodes what arrives, batches it, and sends it on.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.free_ports import free_ports
from tests.integration.conftest import build_checkpoint
from tests.integration.test_trace import check_trace, request_that_loses_its_verifier
from tests.support.collector import collecting

FOLDER = Path(__file__).parents[2] / "docker"
CONFIG: dict[str, Any] = yaml.safe_load((FOLDER / "observability" / "collector.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


@contextmanager
def rotel(folder: Path, exports_to: str) -> Iterator[str]:
    """Run Rotel, which sends on what it gets; yield its endpoint."""
    found = find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("needs Rotel (make test-observability installs it)")
    grpc_port, http_port = free_ports(2)
    words = [
        *(str(Path(found.origin).parent / "rotel-agent"), "start", "--exporter", "otlp"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}", "--otlp-http-endpoint", f"127.0.0.1:{http_port}"),
        *("--otlp-exporter-endpoint", exports_to, "--pid-file", f"{folder}/pid"),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with (folder / "rotel.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    try:
        yield f"http://127.0.0.1:{grpc_port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_the_trace_survives_another_collector(tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path / "tiny")
    with collecting() as last, rotel(tmp_path, last.endpoint) as endpoint:
        check_trace(request_that_loses_its_verifier(checkpoint, tmp_path / "log", endpoint, last))


def test_the_collector_listens_where_the_services_send() -> None:
    grpc = CONFIG["receivers"]["otlp"]["protocols"]["grpc"]
    assert grpc["transport"] == "unix"
    for name in ("gateway", "verifier", "drafter", "verifier-gpu", "drafter-gpu"):
        service = SERVICES[name]
        assert f"--otlp-traces-endpoint=unix:{grpc['endpoint']}" in service["command"], name
        assert "telemetry:/run/telemetry:ro" in service["volumes"], name
    collector = SERVICES["otel-collector"]
    assert "telemetry:/run/telemetry" in collector["volumes"] and collector["user"] == "10001:10001"
    assert SERVICES["otel-socket"]["entrypoint"] == ["rm", "-f", grpc["endpoint"]]


def test_the_collectors_pipeline_names_what_it_configures_and_ends_at_jaeger() -> None:
    (pipeline,) = CONFIG["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert pipeline[kind] == list(CONFIG[kind])
    host, _, port = CONFIG["exporters"]["otlp"]["endpoint"].partition(":")
    # OTLP's port for gRPC, where Jaeger listens.
    assert host in SERVICES and port == "4317"
    grafana = FOLDER / "observability" / "grafana" / "provisioning" / "datasources" / "jaeger.yaml"
    (source,) = yaml.safe_load(grafana.read_text())["datasources"]
    published = SERVICES["jaeger"]["ports"][0].rpartition(":")[2]
    assert (source["type"], source["url"]) == ("jaeger", f"http://jaeger:{published}")
