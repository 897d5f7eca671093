"""The process around the APIs: readiness, admission, disconnects, slow readers, drain, ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import rpc
from foretoken.errors import CheckpointError, ConfigError
from gateway.config import GatewaySettings
from gateway.grpc.api import SERVICE_NAME
from gateway.server import Gateway, run
from gateway.tokenizer import Tokenizer
from gateway.verifier_client import STARTING
from tests.gateway.conftest import LONG_TOKEN, Stack, events, run_stack
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, ScriptedVerifier, serving, steps
from tests.support.tcp_clients import JSON_TYPE, raw_post

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
# Ends a test that hangs: idle connections are kept for longer.
HANG_S = 60.0


async def until(stack: Stack, condition: object) -> None:
    """Ask the gateway something until ``condition`` holds."""
    while not condition():  # type: ignore[operator]
        await stack.http.get("/health")


async def test_not_ready_without_a_verifier(settings: GatewaySettings) -> None:
    settings = settings.model_copy(update={"verifier_wait_s": 0.0})
    async with (
        Gateway(settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel,
    ):
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        for answer in (await client.get("/v1/models"), await client.post(URL, json={"prompt": "a"})):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "service_unavailable"
        (verifier,) = (await client.get("/version")).json()["verifiers"]
        assert "model_name" not in verifier
        up = f'foretoken_verifier_up{{model_name="tiny",verifier="{settings.verifiers[0]}"}}'
        assert f"{up} 0.0" in (await client.get("/metrics")).text
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        alive = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert alive.status == health_pb2.HealthCheckResponse.SERVING


async def test_clients_read_that_the_verifier_is_still_starting(settings: GatewaySettings) -> None:
    settings = settings.model_copy(update={"verifier_wait_s": 0.0})
    (address,) = settings.verifiers
    # It listens and serves nothing, like a verifier that loads its model.
    loading = rpc.async_server()
    rpc.bind(loading, address)
    async with (
        Gateway(settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE) as client,
    ):
        while (await client.get("/ready")).json()["verifiers"][0]["reason"] != STARTING:
            pass
        answer = await client.post(URL, json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("service_unavailable_error", "service_unavailable")
        assert error["message"] == f"not ready: {STARTING}"
    await loading.stop(None)


async def test_ready_and_version_show_drafters_and_transports(stack: Stack) -> None:
    ready = await stack.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    for body in (ready.json(), (await stack.http.get("/version")).json()):
        (verifier,) = body["verifiers"]
        (drafter,) = verifier["drafters"]
        assert (drafter["name"], drafter["transport"], drafter["state"]) == ("ngram", "shared-memory", "attached")
    assert (verifier["device"], verifier["dtype"], verifier["mode"]) == ("CPU", "float32", "strict")
    models = (await stack.http.get("/v1/models")).json()
    assert models["object"] == "list"
    (model,) = models["data"]
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
        "tiny",
        "model",
        "foretoken",
        128,
    )
    assert (await stack.http.get("/v1/models/tiny")).json() == model
    document = (await stack.http.get("/openapi.json")).json()
    assert {"StreamOptions", "SpeculativeFields", "ChatMessage"} <= set(document["components"]["schemas"])
    choice = document["components"]["schemas"]["SpeculativeFields"]["properties"]["drafter"]
    assert "merge" in choice["description"] and "drafted most" in choice["description"]
    assert "#/components/schemas/SpeculativeFields" in json.dumps(document["paths"]["/generate"])


async def test_metrics_hold_own_counts_and_the_verifiers(stack: Stack) -> None:
    stack.verifier.script = steps([65, 66], [67], reason=STOP)
    await stack.http.post(URL, json={"prompt": [5, 6, 7]})
    expected = {
        ("foretoken_prompt_tokens_total",): 3,
        ("foretoken_generation_tokens_total",): 3,
        ("foretoken_request_success_total", "finished_reason", "stop"): 1,
        ("foretoken_time_to_first_token_seconds_count",): 1,
        ("foretoken_inter_token_latency_seconds_count",): 1,
        ("foretoken_e2e_request_latency_seconds_count",): 1,
        ("foretoken_request_queue_time_seconds_sum",): 0.0015,
        # An idle server's queue shows after a wait of 10 ms.
        ("foretoken_request_queue_time_seconds_bucket", "le", "0.001"): 0,
        ("foretoken_request_queue_time_seconds_bucket", "le", "0.003"): 1,
        ("foretoken_request_prefill_time_seconds_sum",): 0.0025,
        ("foretoken_request_decode_time_seconds_sum",): 0.0035,
        ("foretoken_request_inference_time_seconds_sum",): 0.006,
        ("foretoken_request_generation_tokens_sum",): 3,
        ("foretoken_drafter_requests_awaited_total", "drafter", "ngram"): 25,
        ("foretoken_drafter_wait_time_us_total", "drafter", "ngram"): 900,
        ("foretoken_num_requests_running",): 3,
        ("foretoken_num_requests_waiting",): 2,
        ("foretoken_kv_cache_usage_perc",): 0.6,
        ("foretoken_num_preemptions_total",): 5,
        ("foretoken_plain_batch_steps_total",): 7,
        ("foretoken_overlap_blocked_steps_total", "reason", "catching_up"): 11,
        ("foretoken_fallback_reasons_total", "reason", "first_step"): 12,
        ("foretoken_spec_decode_num_drafts_total", "drafter", "ngram"): 20,
        ("foretoken_spec_decode_num_draft_tokens_total", "drafter", "ngram"): 60,
        ("foretoken_spec_decode_num_accepted_tokens_total", "drafter", "ngram"): 30,
        ("foretoken_spec_decode_num_accepted_tokens_per_pos_total", "position", "1"): 10,
        ("foretoken_drafter_info", "transport", "shared-memory"): 1,
    }
    for (name, *label), value in expected.items():
        assert await stack.metric(name, **dict([label] if label else [])) == pytest.approx(value), name


async def test_a_first_token_counts_when_it_comes(stack: Stack) -> None:
    """A dashboard does not wait for the end of a long output."""
    ends = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await ends.wait()
        player.finish()

    stack.verifier.script = play
    async with stack.http.stream("POST", URL, json={"prompt": [5, 6, 7], "stream": True}) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        assert await stack.metric("foretoken_time_to_first_token_seconds_count") == 1
        assert await stack.metric("foretoken_e2e_request_latency_seconds_count") == 0
        ends.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert await stack.metric("foretoken_time_to_first_token_seconds_count") == 1


async def test_vllms_names_show_the_same_samples(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    chosen = settings.model_copy(update={"vllm_metric_names": True})
    async for stack in run_stack(chosen, tokenizer, tmp_path / "v.sock"):
        stack.verifier.script = steps([65, 66], [67])
        await stack.http.post(URL, json={"prompt": [5, 6, 7]})
        for name in VLLM_NAMES:
            theirs = await stack.metric(f"vllm:{name}", model_name="tiny", engine="0")
            assert theirs == await stack.metric(f"foretoken_{name}") != 0, name
        text = (await stack.http.get("/metrics")).text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 10.0' in text
    assert "vllm:kv_cache_free_blocks" not in text and "drafter" not in "".join(
        line for line in text.splitlines() if line.startswith("vllm:")
    )


async def test_what_vllm_bench_and_endpoint_pickers_read_is_shown_without_a_flag(stack: Stack) -> None:
    stack.verifier.script = steps([65, 66], [67])
    await stack.http.post(URL, json={"prompt": [5, 6, 7]})
    text = (await stack.http.get("/metrics")).text
    names = {line.partition("{")[0] for line in text.splitlines() if line.startswith("vllm:")}
    assert names == {
        *(
            f"vllm:spec_decode_num_{name}_total"
            for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        ),
        *(f"vllm:{name}" for name in PICKER_NAMES),
    }
    # llm-d's router takes gauges by these names, and reads the cache's size in labels.
    expected = {"num_requests_waiting": 2, "num_requests_running": 3, "kv_cache_usage_perc": 0.6}
    for name, value in expected.items():
        assert await stack.metric(f"vllm:{name}", model_name="tiny", engine="0") == pytest.approx(value)
        assert f"# TYPE vllm:{name} gauge" in text
    assert await stack.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="10") == 1


PICKER_NAMES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")


# The metrics that vLLM's Grafana board and `vllm bench` read.
VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_sum",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
)


async def test_a_disconnected_client_aborts_at_the_verifier(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens([65])
        await player.aborted.wait()

    stack.verifier.script = play
    for stream in (True, False):
        stack.verifier.aborts.clear()
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
        writer.write(raw_post(URL, body))
        if stream:
            await reader.readuntil(b"data: ")
        else:
            await stack.verifier.until(lambda: len(stack.verifier.submitted) == 2)
        writer.close()
        await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
        await until(stack, lambda: stack.gateway.core.admission.num_requests == 0)
    assert await stack.metric("foretoken_request_failure_total", reason="cancelled") == 2.0


async def test_a_reader_that_stops_reading_grows_nothing_and_stalls_nobody(stack: Stack) -> None:
    # More than all buffers on the way hold.
    count = 10_000
    (long_token,) = stack.ids(LONG_TOKEN)

    async def play(player: Player) -> None:
        if len(player.sequence.prompt_token_ids) == 1:
            for _ in range(count):
                player.tokens([long_token])
        player.finish(LENGTH)

    stack.verifier.info.max_model_len = 100_000
    await stack.gateway.verifiers.fetch_infos()
    stack.verifier.script = play
    body = json.dumps({"prompt": [5], "stream": True, "max_tokens": count}).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", stack.settings.port))
    await loop.sock_sendall(slow, raw_post(URL, body))
    data = bytearray(await loop.sock_recv(slow, 10))
    # The verifier is done with the slow stream and serves others, while most of it is still unread.
    await until(stack, lambda: stack.verifier.submitted and not stack.gateway.verifiers.num_sequences)
    assert (await stack.http.post(URL, json={"prompt": [5, 6]})).status_code == 200
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    while not data.endswith(b"0\r\n\r\n"):
        data += await loop.sock_recv(slow, 1 << 20)
    slow.close()
    lines = data.decode().splitlines()
    chunks = events("".join(line + "\n\n" for line in lines if line.startswith("data: ")))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == LONG_TOKEN * count
    assert len(chunks) < count


async def test_more_requests_than_allowed_get_429(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"max_concurrent_requests": 2})
    async for stack in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        release = asyncio.Event()

        async def play(player: Player, release: asyncio.Event = release) -> None:
            await release.wait()
            player.finish(STOP)

        stack.verifier.script = play
        running = [asyncio.create_task(stack.http.post(URL, json={"prompt": "a"})) for _ in range(2)]
        await stack.verifier.until(lambda stack=stack: len(stack.verifier.submitted) == 2)
        answer = await stack.http.post(URL, json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        # Nothing is done for it, not even parsing.
        assert (await stack.http.post(URL, content=b"{")).status_code == 429
        release.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await stack.http.post(URL, json={"prompt": "a"})).status_code == 200


async def test_drain_lets_streams_finish_and_takes_no_new_ones(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    patient = settings.model_copy(update={"drain_timeout_s": 600.0})
    async for stack in run_stack(patient, tokenizer, tmp_path / "v.sock"):
        await drain_during_a_stream(stack)


async def drain_during_a_stream(stack: Stack) -> None:
    release = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await release.wait()
        player.tokens([66])
        player.finish(STOP)

    stack.verifier.script = play
    running = asyncio.create_task(stack.http.post(URL, json={"prompt": "a", "stream": True}))
    await stack.verifier.until(lambda: len(stack.verifier.submitted) == 1)
    drained = asyncio.create_task(stack.gateway.drain())
    await until(stack, lambda: stack.gateway.core.admission.draining)
    ready = await stack.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    refused = await stack.http.post(URL, json={"prompt": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await stack.http.get("/health")).status_code == 200
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        alive = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert alive.status == health_pb2.HealthCheckResponse.SERVING
    assert not drained.done()
    release.set()
    await drained
    chunks = events((await running).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == stack.tokenizer.decode([65, 66])


async def test_streams_beyond_the_drain_get_an_error(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def play(player: Player) -> None:
        player.tokens([65])
        await player.aborted.wait()

    settings = settings.model_copy(update={"drain_timeout_s": 0.0})
    async for stack in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        stack.verifier.script = play
        request = stack.http.build_request("POST", URL, json={"prompt": "a", "stream": True})
        answer = await stack.http.send(request, stream=True)
        await stack.gateway.drain()
        last = events((await answer.aread()).decode())[-1]
        assert last["error"]["message"] == "the server is shutting down"


async def test_neither_idle_connections_nor_a_reader_that_reads_nothing_hold_the_exit(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"drain_timeout_s": 0.2})
    verifier = ScriptedVerifier(tokenizer.vocab_size)
    ids = tokenizer.encode(LONG_TOKEN)
    going_on = asyncio.Event()

    async def play(player: Player) -> None:
        while not player.aborted.is_set():
            player.tokens(ids)
            await asyncio.sleep(0)
            if player.num_tokens > 4000:
                going_on.set()
                await player.aborted.wait()

    verifier.script = play
    body = json.dumps({"prompt": [5, 6], "max_tokens": 100, "stream": True}).encode()
    request = raw_post(URL, body)
    loop = asyncio.get_running_loop()
    async with serving(verifier, tmp_path / "v.sock"), httpx.AsyncClient(timeout=None, headers=JSON_TYPE) as http:
        with socket.socket() as mute, socket.socket() as idle:
            async with asyncio.timeout(None) as leaving, Gateway(settings) as gateway:
                await gateway.verifiers.wait_up()
                for connection in (mute, idle):
                    connection.setblocking(False)
                    await loop.sock_connect(connection, ("127.0.0.1", settings.port))
                assert (await http.get(f"http://127.0.0.1:{settings.port}/health")).status_code == 200
                await loop.sock_sendall(mute, request)
                await going_on.wait()
                leaving.reschedule(loop.time() + HANG_S)
            # It left the pool: it has drained and stopped.
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", settings.port)):
                pass
            assert gateway.core.admission.num_requests == 0


def test_ports_in_use_are_one_line(settings: GatewaySettings) -> None:
    for port, flag in ((settings.port, "--port"), (settings.grpc_port, str(settings.grpc_port))):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            with pytest.raises(ConfigError) as caught:
                run(settings)
        assert flag in str(caught.value) and "in use" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(settings: GatewaySettings, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        run(settings.model_copy(update={"model": tmp_path}))


async def test_the_process_ends_cleanly_on_sigterm(settings: GatewaySettings, tmp_path: Path) -> None:
    program = (
        "from gateway.config import GatewaySettings; from gateway.server import run; "
        f"run(GatewaySettings.model_validate_json({settings.model_dump_json()!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE
        ) as client:
            while True:
                try:
                    assert (await client.get("/health")).status_code == 200
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        _, errors = await asyncio.to_thread(process.communicate)
        assert (process.returncode, errors) == (0, b"")
    finally:
        process.kill()
        process.wait()
    with socket.socket() as free:
        free.bind(("127.0.0.1", settings.port))
