"""A request through the whole stack shows in the collector, the log and two workers' /metrics."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path

import httpx
import pytest

from foretoken.telemetry import parse
from tests.integration.stack import start, wait_until
from tests.support.collector import collecting

pytestmark = pytest.mark.slow
TRACE, PARENT = "a" * 32, "b" * 16
PROMPT, SALT = "for prompt_words in range(10):\n", "tenant-word"


def test_one_request_is_one_trace_without_text(checkpoint: Path, tmp_path: Path) -> None:
    with collecting() as collector, contextlib.ExitStack() as cleanup:
        flags = ("--otlp-traces-endpoint", collector.endpoint, "--gateway-workers", "2", "--vllm-metric-names")
        stack = start(checkpoint, tmp_path / "log", *flags, "--log-level", "debug")
        cleanup.callback(stack.close)
        stack.wait_ready()
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "n": 2, "cache_salt": SALT, "ignore_eos": True}
        # With one, drafts are requested from the first token on, whatever steps cost now.
        body |= {"prediction": {"type": "content", "content": PROMPT}}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        with httpx.Client(base_url=stack.url, trust_env=False, timeout=None) as client:
            answer = client.post("/v1/completions", json=body, headers=headers).json()
            refused = client.post("/v1/completions", json=body | {"temperature": 9}, headers={"x-request-id": "bad"})
            assert refused.status_code == 400
        collector.spans(2, "text_completion tiny")
        spans = collector.spans(2, "sequence")

        def are_shown() -> bool:
            """Return whether they are; a late worker shows old figures, a late verifier none."""
            families = parse(httpx.get(f"{stack.url}/metrics", timeout=None, trust_env=False).text)
            totals = {s.name: s.value for family in families for s in family.samples}
            names = ("vllm:generation_tokens_total", "foretoken_generation_tokens_total", "vllm:num_requests_running")
            awaited = ("foretoken_drafter_requests_awaited_total", "foretoken_drafter_wait_time_us_total")
            return [totals.get(name) for name in names] == [600, 600, 0] and all(totals.get(n, 0) > 0 for n in awaited)

        for _ in range(6):
            wait_until(are_shown, stack)
        stack.process.send_signal(signal.SIGTERM)
        assert stack.process.wait() == 0, stack.log.read_text()
    (server,) = [span for span in spans if span.attributes.get("foretoken.client_request_id") == "mine"]
    assert (server.service, server.name) == ("foretoken-gateway", "text_completion tiny")
    assert (server.trace_id, server.parent_id, server.is_error) == (TRACE, PARENT, False)
    assert server.attributes["gen_ai.response.id"] == answer["id"]
    assert server.attributes["gen_ai.usage.output_tokens"] == 600
    children = [span for span in spans if span.name == "sequence"]
    assert {span.attributes["foretoken.choice_index"] for span in children} == {0, 1}
    for child in children:
        assert (child.trace_id, child.parent_id) == (TRACE, server.span_id)
        assert child.attributes["gen_ai.latency.time_in_model_decode"] > 0
    check_log(stack.log.read_text(), answer)
    for text in (repr(spans), stack.log.read_text()):
        assert "prompt_words" not in text and SALT not in text


def check_log(text: str, answer: dict[str, object]) -> None:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ends = {line["client_request_id"]: line for line in lines if line["message"].startswith("request")}
    assert set(ends) == {"mine", "bad"}
    assert (ends["mine"]["request_id"], ends["mine"]["trace_id"]) == (answer["id"], TRACE)
    assert (ends["mine"]["outcome"], ends["mine"]["completion_tokens"]) == ("ok", 600)
    assert (ends["bad"]["outcome"], ends["bad"]["field"]) == ("invalid_argument", "temperature")
