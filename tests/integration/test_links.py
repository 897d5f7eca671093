"""Gateway, verifier and drafter as processes that meet over
TCP, guarded by a token or by certificates.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.free_ports import free_ports
from tests.integration.stack import ENVIRONMENT
from tests.support.certificates import Authority

pytestmark = pytest.mark.slow
KEY = "the-operators-key-of-this-test"
SAMPLING = {"max_new_tokens": 120, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}


@contextmanager
def service(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foretoken", *words], env=ENVIRONMENT, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def credentials(kind: str, folder: Path) -> tuple[str, ...]:
    """Return the flags that all services of one deployment get."""
    if kind == "token":
        (folder / "token").write_text(secrets.token_urlsafe(32))
        return ("--link-token-file", str(folder / "token"))
    authority = Authority(folder)
    issued = authority.issue("service")
    files = ("--link-certfile", issued.chain, "--link-keyfile", issued.key, "--link-ca", authority.certificate)
    return tuple(map(str, files))


def until(client: httpx.Client, path: str, is_so: Any, log: Path) -> Any:
    """Wait for another process; the suite's time limit ends a wait in vain."""
    while True:
        try:
            answer = client.get(path).json()
            if is_so(answer):
                return answer
        except (httpx.TransportError, ValueError):
            pass
        assert "Traceback" not in log.read_text(), log.read_text()
        time.sleep(0.05)


def ask(client: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = client.post("/generate", json={"text": "for i in", "sampling_params": SAMPLING, **more})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def is_drafted(client: httpx.Client, plain: list[int]) -> bool:
    """Return whether tokens come from the drafter.

    How much is drafted depends on this machine's costs now.
    """
    answer = ask(client, prediction=plain)
    assert answer["output_ids"] == plain
    return bool(answer["meta_info"]["spec_accept_token_num"] > 0)


@pytest.mark.parametrize("kind", ["token", "certificates"])
def test_a_guarded_deployment_serves_and_its_operator_may_attach(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    drafter, verifier, port, grpc_port, other_port, other_grpc_port = free_ports(6)
    log, key = tmp_path / "log", tmp_path / "key"
    key.write_text(KEY)
    flags = credentials(kind, tmp_path)
    name = ("--served-model-name", "tiny")
    at = f"127.0.0.1:{verifier}"
    with ExitStack() as stack:
        # On all addresses: that needs credentials.
        listening = ("--address", f"0.0.0.0:{verifier}", "--drafter", f"name=ngram,address=127.0.0.1:{drafter}")
        gateway = ("gateway", str(checkpoint), *name, "--verifier", at, "--gateway-workers", "1")
        for words in (
            ("drafter", "--address", f"127.0.0.1:{drafter}", *flags),
            ("verifier", str(checkpoint), *name, *listening, "--threads", "1", *flags),
            (*gateway, "--port", str(port), "--grpc-port", str(grpc_port), "--admin-api-key-file", str(key), *flags),
            # A stranger.
            (*gateway, "--port", str(other_port), "--grpc-port", str(other_grpc_port)),
        ):
            stack.enter_context(service(log, *words))
        headers = {"authorization": f"Bearer {KEY}"}
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=None, headers=headers)
        )
        until(client, "/ready", lambda answer: answer["status"] == "ready", log)
        plain = ask(client, speculative={"enabled": False})["output_ids"]
        while not is_drafted(client, plain):
            pass
        corpus = client.post("/v1/corpora", json={"name": "mine", "text": "for i in range(10):\n"})
        assert corpus.status_code == 200, corpus.text
        assert client.delete("/v1/drafters/ngram").status_code == 200
        attached = client.post("/v1/drafters", json={"name": "ngram", "address": f"127.0.0.1:{drafter}"})
        assert attached.status_code == 200, attached.text
        until(client, "/v1/drafters", lambda answer: "'state': 'attached'" in str(answer), log)
        while not is_drafted(client, plain):
            pass
        stranger = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{other_port}", trust_env=False, timeout=None)
        )
        # It may have tried last before the verifier listened.
        status = "UNAUTHENTICATED" if kind == "token" else "UNAVAILABLE"
        until(stranger, "/ready", lambda answer: f"the verifier cannot be reached: {status}" in str(answer), log)
        assert stranger.get("/ready").status_code == 503
    text = log.read_text()
    assert f"the verifier cannot be reached: {status}" in text
    if kind == "token":
        assert (tmp_path / "token").read_text() not in text
