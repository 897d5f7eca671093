"""Trace context in and out of the gateway, and each request's span as a collector decodes it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from foretoken import tracing
from foretoken.errors import ConfigError
from foretoken.tracing import make_tracer, trace_context
from gateway.config import GatewaySettings
from gateway.server import run
from gateway.tokenizer import Tokenizer
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import Stack, run_stack
from tests.gateway.scripted_verifier import LENGTH, Player, steps
from tests.support.collector import ReceivedSpan, collecting

TRACE, PARENT = "a" * 32, "b" * 16
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
SERVER = 2


@pytest.mark.anyio
async def test_without_an_endpoint_context_passes_through(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await stack.http.post("/v1/completions", json={"prompt": "a"}, headers=HEADERS)
    await stack.http.post("/v1/completions", json={"prompt": "a"}, headers={**HEADERS, "traceparent": "00-x-y-01"})
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        metadata = [(key, value) for key, value in HEADERS.items() if key.startswith("trace")]
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
            gateway_pb2.GenerateRequest(text="a", request_id="g"), metadata=metadata
        )
        assert [response async for response in call]
    passed, malformed, by_grpc = stack.verifier.submitted
    for sequence in (passed, by_grpc):
        assert (sequence.traceparent, sequence.tracestate) == (HEADERS["traceparent"], "vendor=1")
    assert not malformed.HasField("traceparent") and not malformed.HasField("tracestate")
    lines = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert [line["trace_id"] for line in lines] == [TRACE, None, TRACE]
    assert [line["client_request_id"] for line in lines] == ["mine", "mine", "g"]


@pytest.mark.anyio
async def test_each_request_is_one_span_and_the_verifiers_parent(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def play(player: Player) -> None:
        if list(player.sequence.prompt_token_ids) == [9]:
            player.error(grpc.StatusCode.INTERNAL, "boom")
        elif list(player.sequence.prompt_token_ids) == [5, 6, 7]:
            await steps([65, 66], [67])(player)
        else:
            await steps(tokenizer.encode("a secret answer"))(player)

    with collecting() as collector:
        traced = settings.model_copy(update={"otlp_traces_endpoint": collector.endpoint})
        async for stack in run_stack(traced, tokenizer, tmp_path / "v.sock"):
            stack.verifier.script = play
            await requests(stack)
            submitted = {tuple(sequence.prompt_token_ids): sequence for sequence in stack.verifier.submitted}
        # Leaving the block has sent the rest.
        spans = collector.spans(6)
    by_id = {span.attributes.get("foretoken.client_request_id", ""): span for span in spans}
    assert len(spans) == len(by_id) == 6
    assert {(span.service, span.kind) for span in spans} == {("foretoken-gateway", SERVER)}
    check_completion(by_id["mine"])
    assert submitted[5, 6, 7].traceparent == f"00-{TRACE}-{by_id['mine'].span_id}-01"
    assert submitted[5, 6, 7].tracestate == "vendor=1"
    chat = by_id["chat"]
    assert (chat.name, chat.parent_id, chat.attributes["gen_ai.operation.name"]) == ("chat tiny", "", "chat")
    assert chat.trace_id != TRACE
    assert by_id["grpc"].name == "text_completion tiny" and by_id["grpc"].parent_id == PARENT
    assert (by_id["refused"].is_error, by_id["refused"].attributes["error.type"]) == (True, "invalid_argument")
    assert by_id["refused"].parent_id == PARENT
    assert (by_id["failed"].is_error, by_id["failed"].attributes["error.type"]) == (True, "internal")
    # No attribute or field holds anybody's text.
    assert "secret" not in repr(spans)
    assert not [record for record in caplog.records if "secret" in repr(vars(record))]


async def requests(stack: Stack) -> None:
    url = "/v1/completions"
    await stack.http.post(url, json={"prompt": [5, 6, 7], "max_tokens": 9, "seed": 3, "n": 1}, headers=HEADERS)
    message = {"role": "user", "content": "a secret"}
    await stack.http.post("/v1/chat/completions", json={"messages": [message]}, headers={"x-request-id": "chat"})
    refused = {**HEADERS, "x-request-id": "refused"}
    assert (await stack.http.post(url, json={"prompt": "secret", "n": -1}, headers=refused)).status_code == 400
    failed = {**HEADERS, "x-request-id": "failed"}
    assert (await stack.http.post(url, json={"prompt": [9]}, headers=failed)).status_code == 500
    assert "secret" in (await stack.http.post(url, json={"prompt": "secret"}, headers={"x-request-id": "told"})).text
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
            gateway_pb2.GenerateRequest(text="secret", request_id="grpc"),
            metadata=[("traceparent", HEADERS["traceparent"])],
        )
        assert [response async for response in call]


def check_completion(span: ReceivedSpan) -> None:
    assert (span.name, span.trace_id, span.parent_id) == ("text_completion tiny", TRACE, PARENT)
    assert (span.trace_state, span.is_error) == ("vendor=1", False)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "foretoken",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
    }
    assert expected.items() <= span.attributes.items()
    assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] <= span.duration_s
    assert str(span.attributes["gen_ai.response.id"]).startswith("cmpl-")


@pytest.mark.anyio
async def test_each_request_ends_in_one_line_and_one_count(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Also a request that fails before its first byte, which generation and service both see."""

    async def play(player: Player) -> None:
        prompt = list(player.sequence.prompt_token_ids)
        if prompt == [8]:
            player.error(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        elif prompt == [9]:
            player.error(grpc.StatusCode.INTERNAL, "boom")
        else:
            player.tokens([65])
            player.finish(LENGTH)

    caplog.set_level(logging.INFO)
    stack.verifier.script = play
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for prompt in ([5], [8], [9], [10**6]):
            answer = await stack.http.post("/v1/completions", json={"prompt": prompt})
            request = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=prompt), request_id="g")
            try:
                assert [r async for r in stub.Generate(request)] and answer.status_code == 200
            except grpc.aio.AioRpcError:
                assert answer.status_code != 200
    stack.gateway.core.admission.draining = True
    assert (await stack.http.post("/v1/completions", json={"prompt": [5]})).status_code == 503
    lines = [vars(r) for r in caplog.records if r.getMessage() in ("request", "request refused")]
    assert sorted((line["api"], line["outcome"]) for line in lines) == sorted(
        [(api, outcome) for api in ("grpc", "/v1/completions") for outcome in OUTCOMES]
        + [("/v1/completions", "unavailable")]
    )
    assert all(line["request_id"] for line in lines if line["msg"] == "request")
    for reason in ("resource_exhausted", "invalid_argument"):
        assert await stack.metric("foretoken_admission_rejections_total", reason=reason) == 2
        assert await stack.metric("foretoken_request_failure_total", reason=reason) == 0
    assert await stack.metric("foretoken_admission_rejections_total", reason="unavailable") == 1
    assert await stack.metric("foretoken_request_failure_total", reason="internal") == 2
    assert await stack.metric("foretoken_admission_rejections_total", reason="internal") == 0
    assert await stack.metric("foretoken_e2e_request_latency_seconds_count") == 4


OUTCOMES = ("ok", "resource_exhausted", "internal", "invalid_argument")


def test_a_collector_that_takes_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own flush waits for as long as the exporter tries."""
    called, release = threading.Event(), threading.Event()

    def export(self: OTLPSpanExporter, spans: object) -> SpanExportResult:
        called.set()
        release.wait()
        return SpanExportResult.FAILURE

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.1)
    tracer = make_tracer("http://127.0.0.1:9", "gateway")
    assert tracer is not None
    tracer.start("span", None, {}, kind="server").end({})
    tracer.close()
    assert called.is_set()
    release.set()


def test_headers_that_are_not_well_formed_are_no_context() -> None:
    good = HEADERS["traceparent"]
    assert trace_context(good, "a=1") == (good, "a=1")
    assert trace_context(good, "x" * 513) == trace_context(good, "é") == trace_context(good) == (good, None)
    for bad in (
        "",
        good + "-x",
        good.upper(),
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        "ff" + good[2:],
    ):
        assert trace_context(bad) is None


def test_an_endpoint_that_is_no_url_is_refused(settings: GatewaySettings) -> None:
    for endpoint in ("localhost:4317", "unix:", "unix:relative"):
        expected = f"--otlp-traces-endpoint: expected http://host:port or unix:/path, got '{endpoint}'"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            run(settings.model_copy(update={"otlp_traces_endpoint": endpoint}))


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "foretoken.span_exporter", raising=False)
    with pytest.raises(ConfigError, match=r"-m pip install opentelemetry-exporter-otlp-proto-grpc$"):
        make_tracer("http://127.0.0.1:4317", "gateway")


def test_without_an_endpoint_no_exporter_is_imported() -> None:
    program = (
        "import sys, gateway.server, foretoken.tracing as t; assert t.make_tracer(None, 'gateway') is None; "
        "t.trace_context('00-' + 'a' * 32 + '-' + 'b' * 16 + '-01');"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter.otlp'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
