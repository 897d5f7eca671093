"""A new drafter needs one file, tests/support/toy_drafter.py, and one row, in toy_foretoken.py."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.free_ports import free_ports
from tests.integration.stack import ENVIRONMENT, EXACT

TOY_FORETOKEN = "tests.support.toy_foretoken"
REACH = "500"


def foretoken(*words: str, module: str = TOY_FORETOKEN) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *words], env=ENVIRONMENT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server with one toy drafter in its verifier, and one in its own process."""
    folder = tmp_path_factory.mktemp("toy")
    port, grpc_port = (str(free) for free in free_ports(2))
    model, reach = str(checkpoint), ("--speculative-toy-reach", REACH)
    drafters = ("--drafter", "name=inside,algorithm=plaything", "--drafter", f"name=outside,address=unix:{folder}/d")
    services = (
        (TOY_FORETOKEN, "drafter", "--name", "outside", "--algorithm", "TOY", *reach, "--address", f"unix:{folder}/d"),
        (TOY_FORETOKEN, "verifier", model, "--address", f"unix:{folder}/v", "--threads", "1", *reach, *drafters),
        ("foretoken", "gateway", model, "--verifier", f"unix:{folder}/v", "--port", port, "--grpc-port", grpc_port),
    )
    with ExitStack() as stack:
        processes = []
        for module, command, *words in services:
            log = stack.enter_context((folder / command).open("w"))
            process = subprocess.Popen([sys.executable, "-m", module, command, *words], env=ENVIRONMENT, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        url = f"http://127.0.0.1:{port}"
        while not are_attached(url):
            ended = [log.read_text() for log in folder.iterdir() if log.is_file()]
            assert all(process.poll() is None for process in processes), ended
            time.sleep(0.05)
        yield url


def are_attached(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/version", timeout=None, trust_env=False).json()
    except httpx.TransportError:
        return False
    found = {drafter["name"]: drafter for one in answer["verifiers"] for drafter in one["drafters"]}
    return {name: drafter["state"] for name, drafter in found.items()} == {"inside": "attached", "outside": "attached"}


def complete(url: str, **speculative: Any) -> dict[str, Any]:
    body = {"prompt": "for i in range(10):\n", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json=body | {"speculative": speculative}, timeout=None, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inside", "outside"])
def test_its_drafts_are_accepted_and_the_text_is_plain_decodes(url: str, name: str) -> None:
    plain, drafted = complete(url, enabled=False), complete(url, drafter=name, **EXACT)
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    figures = drafted["metrics"]["speculative_decoding"]["drafters"]
    assert figures.keys() == {name} and figures[name]["num_accepted_draft_tokens"] > 100, figures


@pytest.mark.slow
def test_its_flag_reaches_it(url: str) -> None:
    """A drafter's gauges are read in the background: the verifier may not have both yet."""
    while len(found := gauges(url)) < 2:
        time.sleep(0.05)
    assert found == {"inside": float(REACH), "outside": float(REACH)}


def gauges(url: str) -> dict[str, float]:
    """Return ``toy_reach`` of each drafter."""
    text = httpx.get(f"{url}/metrics", timeout=None, trust_env=False).text
    lines = re.findall(r'^foretoken_drafter_toy_reach\{.*drafter="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


@pytest.mark.slow
def test_commands_know_it_by_its_row(checkpoint: Path) -> None:
    text = "".join(foretoken("serve", "--help").stdout.split())
    assert "STANDALONE|TOY|PLAYTHING|NONE" in text and "--speculative-toy-reachINTEGER" in text
    plan = foretoken("serve", str(checkpoint), "--speculative-algorithm", "plaything", "--dry-run")
    assert "toy (TOY, process)" in plan.stdout, plan.stderr
    for words, message in (
        (("--drafter", "name=a,algorithm=TOY,threads=2"), "threads: is for drafters of algorithm EAGLE, EAGLE3, MTP, "),
        (("--speculative-toy-reach", "9"), "has an effect only with a drafter of --speculative-algorithm TOY"),
        (("--drafter", "name=a,algorithm=TOY", "--speculative-toy-reach", "0"), "reach: expected at least 1, got 0"),
        (("--drafter", "name=a,algorithm=GAME"), "expected NGRAM, EAGLE, EAGLE3, MTP, STANDALONE or TOY, got 'GAME'"),
    ):
        refused = foretoken("serve", str(checkpoint), *words, "--dry-run")
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
