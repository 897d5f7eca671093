"""Clients can understand the answers to too long prompts and too large bodies."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from foretoken import limits
from foretoken.limits import MAX_BODY_BYTES
from gateway import http_protocol
from tests.gateway.conftest import Stack
from tests.support.tcp_clients import chunk, chunked_post, raw_post

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
# The tiny model's context has 128 tokens.
TOO_LONG = {
    "ids": (COMPLETIONS, {"prompt": [1] * 130}, "130 in the messages", "prompt"),
    "encoded": (COMPLETIONS, {"prompt": "a b " * 40}, "160 in the messages", "prompt"),
    "never encoded": (COMPLETIONS, {"prompt": "a" * 1_500_000}, "at least", "prompt"),
    "too many characters": (COMPLETIONS, {"prompt": "a" * 2_000_001}, "at least", "prompt"),
    "a chat": (CHAT, {"messages": [{"role": "user", "content": "a b " * 40}]}, "in the messages", "messages"),
    "a chat of too many characters": (
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 2_000_001}]},
        "your messages have 2000",
        "messages",
    ),
    "SGLang": (GENERATE, {"text": "a b " * 40}, "160 in the messages", "text"),
    "SGLang's ids": (GENERATE, {"input_ids": [1] * 128}, "requested 129 tokens (128", "input_ids"),
}


@pytest.mark.parametrize("case", TOO_LONG)
async def test_a_prompt_beyond_the_context_is_refused_in_openais_words(stack: Stack, case: str) -> None:
    path, body, words, field = TOO_LONG[case]
    answer = await stack.http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert error["message"].startswith("This model's maximum context length is 128 tokens. However, you")
    assert words in error["message"] and error["param"] == field
    assert not stack.verifier.submitted


def test_many_bytes_in_few_characters_are_too_long_as_well() -> None:
    with pytest.raises(limits.ContextLengthError, match="4000001 bytes"):
        limits.check_prompt_size("prompt", 5, 128, num_bytes=4_000_001)


async def test_the_sdk_gets_the_code(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a b " * 100}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
        assert missing.value.code == "model_not_found"


async def test_a_client_may_ask_before_it_sends_its_body(stack: Stack) -> None:
    """curl does so for bodies above 1 MiB: ``Expect: 100-continue``."""
    body = json.dumps({"prompt": "a" * 1_100_000}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(stack.url).port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400") and b"context_length_exceeded" in answer


# Bodies too large. The last size is more than all buffers between two sockets hold.
SIZES = [MAX_BODY_BYTES + 1, 5 * MAX_BODY_BYTES]


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("header", ["connection: keep-alive", "connection: close"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/none"])
async def test_a_client_that_sends_all_before_it_reads_gets_the_answer(
    stack: Stack, num_bytes: int, header: str, path: str
) -> None:
    def exchange() -> bytes:
        with socket.create_connection(("127.0.0.1", stack.settings.port)) as connection:
            connection.sendall(raw_post(path, b" " * num_bytes, header))
            data = b""
            while part := connection.recv(65536):
                data += part
                if b"\r\n\r\n" in data and data.endswith(b"}"):
                    break
            return data

    data = await asyncio.to_thread(exchange)
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 " if path == COMPLETIONS else b"HTTP/1.1 404 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_chunked_body_gets_the_answer_after_its_end(stack: Stack) -> None:
    def exchange() -> bytes:
        with socket.create_connection(("127.0.0.1", stack.settings.port)) as connection:
            connection.sendall(chunked_post(COMPLETIONS))
            part = chunk(b" " * MAX_BODY_BYTES)
            for _ in range(4):
                connection.sendall(part)
            connection.sendall(b"0\r\n\r\n")
            data = b""
            # The server closes after the body's end.
            while received := connection.recv(65536):
                data += received
            return data

    assert (await asyncio.to_thread(exchange)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_bytes", SIZES)
async def test_clients_read_the_413(stack: Stack, num_bytes: int) -> None:
    text = "a" * num_bytes
    answer = await stack.http.post(COMPLETIONS, json={"prompt": text})
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    async with httpx.AsyncClient(base_url=stack.url) as fresh:
        assert (await fresh.post(CHAT, json={"messages": text})).status_code == 413
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="tiny", prompt=text)
        assert caught.value.status_code == 413 and "larger than" in caught.value.message
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--noproxy", "*", "-H", "content-type: application/json", "--data-binary", "@-"),
        *("-w", " %{http_code}", f"{stack.url}{COMPLETIONS}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(b'{"prompt": "%s"}' % text.encode())
    assert process.returncode == 0 and output.endswith(b" 413"), output


async def test_a_client_that_sends_for_ever_is_cut(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(COMPLETIONS, b"", f"content-length: {1 << 50}"))
    assert b" 413 " in await reader.readline()
    with pytest.raises(ConnectionError):
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
    writer.close()
    # A client that only waits is cut too.
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(COMPLETIONS, b"", f"content-length: {1 << 50}"))
    assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
    # Only the test's own connection is left.
    while len(stack.gateway.connections) > 1:
        await stack.http.get("/health")
    writer.close()
