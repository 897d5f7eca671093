"""Every panel of the dashboard shows data of a loaded stack that a real Prometheus has scraped."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.stack import free_ports
from foretoken.telemetry import parse
from tests.integration.stack import Stack, running, wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDER, DEMO = ROOT / "docker" / "observability", ROOT / "models" / "demo"
DASHBOARD = json.loads((FOLDER / "grafana" / "foretoken.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Figures of overlapped steps, which a CPU does not have.
ON_A_GPU = {"What the controller chose", "Why the controller chose it", "Why steps did not overlap"}
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
    """Run Prometheus with the profile's configuration, but for the target and a shorter interval; return its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (on Debian: apt-get install prometheus)")
    folder, (port,) = tmp_path_factory.mktemp("prometheus"), free_ports(1)
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{stack.port}"]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    listen = f"127.0.0.1:{port}"
    words = [program, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    yield f"http://{listen}"
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
        return not missing(prometheus, {"up": 'up{job="foretoken"} == 1'})
    except httpx.TransportError:
        return False


def test_every_panel_has_data(stack: Stack, prometheus: str) -> None:
    queries = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        if panel["title"] not in ON_A_GPU
        for target in panel["targets"]
    }
    wait_until(lambda: is_scraped(prometheus), stack)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            leave(stack)
            assert set(pool.map(lambda number: complete(stack, number), range(20))) == {200, 400}
            if not (left := missing(prometheus, queries)):
                break
    assert left == {}


def test_no_alert_fires_while_all_is_well(stack: Stack, prometheus: str) -> None:
    wait_until(lambda: is_scraped(prometheus), stack)
    alerts = httpx.get(f"{prometheus}/api/v1/rules", trust_env=False, timeout=None).json()["data"]["groups"][0]["rules"]
    assert len(alerts) == 10
    assert {alert["name"]: alert["health"] for alert in alerts if alert["health"] == "err"} == {}
    assert [alert["name"] for alert in alerts if alert["state"] == "firing"] == []


def test_panels_of_a_gpu_query_metrics_that_are_declared(stack: Stack) -> None:
    """Their series are missing on a CPU, so at least their names are held against the docs."""
    docs = (ROOT / "docs" / "metrics.md").read_text()
    names = {family.name for family in parse(httpx.get(f"{stack.url}/metrics", trust_env=False, timeout=None).text)}
    assert "foretoken_engine_steps" in {name.removesuffix("_total") for name in names}
    assert "drafter_chosen_NAME" in docs and "overlap_blocked_steps_total" in docs
    assert {panel["title"] for panel in PANELS} >= ON_A_GPU
