"""Every panel of the dashboard shows data of a loaded stack that a real Prometheus has scraped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import yaml

from foretoken.free_ports import free_ports
from foretoken.telemetry import EXPOSITION_TYPE, render
from gateway.messages import DrafterInfo, VerifierInfo
from gateway.verifier_metrics import VerifierMetrics
from tests.integration.stack import Stack, running, wait_until
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.speculation.controllers import DrafterController

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDER, DEMO = ROOT / "docker" / "observability", ROOT / "models" / "demo"
DASHBOARD = json.loads((FOLDER / "grafana" / "foretoken.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Figures of overlapped steps, which a CPU does not have.
ON_A_GPU = {
    "What the controller chose",
    "Why the controller chose it",
    "Reason of the controller's choice",
    "Why steps did not overlap",
}
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    drafters = (f"name=eagle3,algorithm=EAGLE3,model={DEMO / 'eagle3'}", "name=ngram,algorithm=NGRAM")
    words = [word for drafter in drafters for word in ("--drafter", drafter)]
    with running(DEMO / "target", tmp_path_factory.mktemp("stack") / "log", *words) as stack:
        wait_until(lambda: attached(stack) == {"eagle3", "ngram"}, stack)
        yield stack


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scraping(stack.port, tmp_path_factory.mktemp("prometheus")) as url:
        yield url


@contextmanager
def scraping(port: int, folder: Path) -> Iterator[str]:
    """Run Prometheus with the profile's configuration, but for the target and a shorter interval.

    Yield its URL.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (on Debian: apt-get install prometheus)")
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    words = [program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait()


def attached(stack: Stack) -> set[str]:
    ready = httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).json()
    drafters = [drafter for verifier in ready["verifiers"] for drafter in verifier["drafters"]]
    return {drafter["name"] for drafter in drafters if drafter["state"] == "attached"}


def complete(stack: Stack, number: int) -> int:
    """Send a request of the load: some are refused, some share a prefix, each drafter gets some."""
    body = {"prompt": PROMPT + "    " * (number % 4), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    drafter = ("eagle3", "ngram", "auto")[number % 3]
    body |= {"speculative": {"drafter": drafter}, "prediction": {"type": "content", "content": PROMPT * 4}}
    if number % 10 == 9:
        body["temperature"] = 9
    return httpx.post(f"{stack.url}/v1/completions", json=body, timeout=None, trust_env=False).status_code


def leave(stack: Stack) -> None:
    """Break a stream off, which counts as a failed request."""
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=None, trust_env=False) as answer:
        next(answer.iter_lines())


def missing(prometheus: str, queries: dict[str, str]) -> dict[str, str]:
    """Return the queries without data."""

    def has_data(expression: str) -> bool:
        expression = expression.replace("$__rate_interval", "20s")
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, trust_env=False, timeout=None)
        found = answer.json()
        assert found["status"] == "success", found
        return any(result["value"][1] != "NaN" for result in found["data"]["result"])

    return {name: query for name, query in queries.items() if not has_data(query)}


def is_scraped(prometheus: str) -> bool:
    try:
        # While it starts, it refuses queries.
        if httpx.get(f"{prometheus}/-/ready", trust_env=False, timeout=None).status_code != 200:
            return False
        return not missing(prometheus, {"up": 'up{job="foretoken"} == 1'})
    except httpx.TransportError:
        return False


def queries(*, on_a_gpu: bool) -> dict[str, str]:
    """Return the panels' queries by title and letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        if (panel["title"] in ON_A_GPU) == on_a_gpu
        for target in panel["targets"]
    }


def test_every_panel_has_data(stack: Stack, prometheus: str) -> None:
    wait_until(lambda: is_scraped(prometheus), stack)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            leave(stack)
            assert set(pool.map(lambda number: complete(stack, number), range(20))) == {200, 400}
            if not (left := missing(prometheus, queries(on_a_gpu=False))):
                break
    assert left == {}


def test_no_alert_fires_while_all_is_well(stack: Stack, prometheus: str) -> None:
    wait_until(lambda: is_scraped(prometheus), stack)
    alerts = httpx.get(f"{prometheus}/api/v1/rules", trust_env=False, timeout=None).json()["data"]["groups"][0]["rules"]
    assert len(alerts) == 10
    assert {alert["name"]: alert["health"] for alert in alerts if alert["health"] == "err"} == {}
    assert [alert["name"] for alert in alerts if alert["state"] == "firing"] == []


class GpuFigures(BaseHTTPRequestHandler):
    """The gateway's metrics of a verifier whose steps overlap, as this machine's never do."""

    metrics = VerifierMetrics("demo")
    steps = itertools.count(1)

    def do_GET(self) -> None:
        drafter = SimpleNamespace(number=1, decision={})
        bounds = TreeBounds(max_nodes=8)
        DrafterController(cast(Any, drafter), bounds, lambda rows: 1e-3 * rows, limit_s=math.inf).choose(4)
        of_drafter = DrafterInfo(*("eagle3", "EAGLE3", "shared-memory", "", "attached", ""), *[1] * 5, ())
        numbers = {field.name: 0 for field in dataclasses.fields(VerifierInfo)}
        reasons = {"no_wait_budget": next(self.steps)}
        more = {
            "step_time_us": {},
            "overlap_blocked_steps": reasons,
            "fallback_reasons": {},
            "drafters": (dataclasses.replace(of_drafter, gauges=drafter.decision),),
        }
        text = render(self.metrics.families({"unix:/v": VerifierInfo(**cast(Any, numbers | more))}))
        self.send_response(200)
        self.send_header("content-type", EXPOSITION_TYPE)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_panels_of_a_gpu_have_data_of_the_same_names(tmp_path: Path) -> None:
    """The figures are made up; their names are the controller's and the gateway's own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), GpuFigures)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with scraping(server.server_port, tmp_path) as url:
            while not is_scraped(url) or missing(url, queries(on_a_gpu=True)):
                time.sleep(0.2)
    finally:
        server.shutdown()
        server.server_close()
    assert {panel["title"] for panel in PANELS} >= ON_A_GPU
