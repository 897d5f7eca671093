"""What a stream's client gets: a step in one write while
it reads, one merged chunk when it lags.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gateway.http_protocol import HttpProtocol
from gateway.news import News
from gateway.openai.response import CompletionFormat
from gateway.output import Output
from protos import verifier_pb2
from tests.gateway.conftest import LONG_TOKEN, Stack, events
from tests.gateway.deployment import logprob
from tests.gateway.scripted_verifier import LENGTH, Player, steps
from tests.support.tcp_clients import connect_slow, raw_post, read_until_cut

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
CHAT_URL = "/v1/chat/completions"
# More than all buffers on the way hold, with LONG_TOKEN.
MANY = 10_000


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return every part that was written without the answer's task, in order."""
    parts: list[bytes] = []
    write_part = HttpProtocol.write_part

    def write(connection: HttpProtocol, data: bytes) -> None:
        parts.append(data)
        write_part(connection, data)

    monkeypatch.setattr(HttpProtocol, "write_part", write)
    return parts


class JointSteps:
    """Plays all outputs of a request together: each step is one message with a token for each."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = rows
        self._players: list[Player] = []
        # Set when the client has read the step before.
        self.may_go_on = asyncio.Event()

    async def __call__(self, player: Player) -> None:
        self._players.append(player)
        if len(self._players) < len(self._rows):
            return
        for step in zip(*self._rows, strict=True):
            self.may_go_on.clear()
            tokens = [
                verifier_pb2.Tokens(
                    request_id=player.sequence.request_id,
                    choice_index=player.sequence.choice_index,
                    offset=player.num_tokens,
                    token_ids=[token_id],
                    sources=[0],
                )
                for player, token_id in zip(self._players, step, strict=True)
            ]
            for player in self._players:
                player.num_tokens += 1
            player._send(verifier_pb2.SessionResponse(tokens=tokens))
            await self.may_go_on.wait()
        for player in self._players:
            player.finish(LENGTH)


async def http_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a chunked answer."""
    await reader.readuntil(b"\r\n\r\n")
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def test_the_events_of_a_step_are_one_write(stack: Stack, written: list[bytes]) -> None:
    rows = [stack.ids("hello world def add first"), stack.ids("def add first hello world")]
    num_steps = min(map(len, rows))
    rows = [row[:num_steps] for row in rows]
    script = stack.verifier.script = JointSteps(rows)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(URL, {"prompt": [5], "n": 2, "stream": True, "max_tokens": num_steps, "temperature": 0}))
    chunks = []
    async for chunk in http_chunks(reader):
        chunks.append(chunk)
        script.may_go_on.set()
    writer.close()
    seen = [json_events(chunk) for chunk in chunks[:num_steps]]
    assert [sorted(event["choices"][0]["index"] for event in step) for step in seen] == [[0, 1]] * num_steps
    # All but the first, which begins the answer, without waking its task.
    assert written == chunks[1:num_steps]
    for index, row in enumerate(rows):
        shown = [event["choices"][0] for event in events(b"".join(chunks).decode())]
        text = "".join(choice["text"] for choice in shown if choice["index"] == index)
        assert text == stack.tokenizer.decode(row, skip_special_tokens=True)


def json_events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix("data: ")) for block in data.decode().split("\n\n")[:-1]]


async def test_chunks_that_wait_for_a_slow_reader_are_merged(stack: Stack) -> None:
    stack.verifier.info.max_model_len = 1_000_000
    await stack.http.get("/ready")
    (long_token,) = stack.ids(LONG_TOKEN)
    (short_token,) = stack.ids("s")
    ids = [short_token, long_token] * (MANY // 2)

    async def play(player: Player) -> None:
        for token_id in ids:
            player.tokens([token_id], logprobs=[logprob(token_id)])
        player.finish(LENGTH)

    stack.verifier.script = play
    fields = {"prompt": [5], "stream": True, "max_tokens": MANY, "logprobs": 1, "return_token_sources": True}
    fields |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "temperature": 0}
    with await connect_slow(stack.settings.port) as slow:
        request = raw_post(URL, fields, "connection: close")
        await asyncio.get_running_loop().sock_sendall(slow, request)
        await stack.verifier.until(lambda: len(stack.verifier.submitted) == 1)
        while stack.gateway.verifiers.num_sequences:
            # A request that is answered at once: the gateway takes the tokens meanwhile.
            await stack.http.get("/health")
        lines = (await read_until_cut(slow)).decode().splitlines()
    chunks = events("".join(line + "\n\n" for line in lines if line.startswith("data: ")))
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert len(choices) < MANY // 2
    # Not compared in the assertions: pytest's report of so large a difference would take minutes.
    is_whole = "".join(choice["text"] for choice in choices) == ("s" + LONG_TOKEN) * (MANY // 2)
    assert is_whole
    has_ids = [token_id for choice in choices for token_id in choice["token_ids"]] == ids
    assert has_ids
    seen = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert len(seen) == MANY
    assert max(abs(value + math.log(token_id + 2)) for value, token_id in zip(seen, ids, strict=True)) < 1e-5
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == MANY


@pytest.mark.parametrize("stream", [True, False])
async def test_a_script_waits_for_a_reader_that_is_late(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Tests that count chunks rely on it.

    Where a client wants the whole, no chunk is waited for.
    """

    def add_late(news: News, output: Output) -> None:
        if not news:
            # More than one message would gather meanwhile.
            asyncio.get_running_loop().call_later(0.05, news._announce)
        news._changed[output.index] = output

    monkeypatch.setattr(News, "add", add_late)
    words = ["hello", " world", " def", " add"]
    stack.verifier.script = steps(*map(stack.ids, words))
    answer = await stack.http.post(URL, json={"prompt": [5], "stream": stream, "max_tokens": 20})
    texts = [
        choice["text"] for event in (events(answer.text) if stream else [answer.json()]) for choice in event["choices"]
    ]
    assert texts == ([*words, ""] if stream else ["".join(words)])


async def test_a_fault_in_a_chunk_ends_its_stream_alone(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's task learns of a fault in what was written without it."""
    chunk_text, num_chunks = CompletionFormat._chunk_text, 0

    def fail_third(self: CompletionFormat, *args: Any) -> bytes:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 3:
            raise ValueError("a bug")
        return chunk_text(self, *args)

    monkeypatch.setattr(CompletionFormat, "_chunk_text", fail_third)
    script = stack.verifier.script = JointSteps([stack.ids("hello world def add")])
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(raw_post(URL, {"prompt": [5], "stream": True, "max_tokens": 9}))
    seen = []
    async for chunk in http_chunks(reader):
        seen += events(chunk.decode()) if chunk.endswith(b"[DONE]\n\n") else json_events(chunk)
        script.may_go_on.set()
    writer.close()
    assert [event.get("error", {}).get("type") for event in seen] == [None, None, "server_error"]
    # The verifier gets the abort, and the place is free for the next request.
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
    assert await stack.metric("foretoken_request_failure_total", reason="internal") == 1
    assert stack.gateway.core.admission.num_requests == 0


@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_the_bytes_of_chunks(stack: Stack, usage: dict[str, bool] | None) -> None:
    """Fields and their order are the API; what all chunks share is encoded once."""
    body = {"stream": True, "max_tokens": 2, "temperature": 0} | ({"stream_options": usage} if usage else {})
    tail = ',"usage":null' if usage else ""

    async def play(player: Player) -> None:
        for text in ("s", '"'):
            player.tokens(stack.ids(text))
            await player.taken()
        player.finish(LENGTH)

    stack.verifier.script = play
    whole = (await stack.http.post(URL, json=body | {"prompt": [5]})).text
    envelope = whole[len("data: {") : whole.index(',"choices"')]
    assert [pair.split(":")[0] for pair in envelope.split(",")] == ['"id"', '"object"', '"created"', '"model"']
    texts = "".join(event["choices"][0]["text"] for event in events(whole) if event["choices"])
    assert texts == 's"'
    first = whole.split("\n\n")[0]
    shown = json.dumps(json.loads(first.removeprefix("data: "))["choices"][0]["text"])
    choice = f'{{"index":0,"text":{shown},"logprobs":null,"finish_reason":null}}'
    assert first == f'data: {{{envelope},"choices":[{choice}]{tail}}}'

    chat = (await stack.http.post(CHAT_URL, json=body | {"messages": [{"role": "user", "content": "s"}]})).text
    role, first, *_ = chat.split("\n\n")
    envelope = chat[len("data: {") : chat.index(',"choices"')]
    shown = json.dumps(json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["content"])
    choice = f'{{"index":0,"delta":{{"content":{shown}}},"logprobs":null,"finish_reason":null}}'
    assert first == f'data: {{{envelope},"choices":[{choice}]{tail}}}'
    assert json.loads(role.removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_step_whose_text_waits_sends_a_chunk_without_text(stack: Stack, is_chat: bool) -> None:
    """A character's bytes may take several steps; the stream must not seem to pause meanwhile."""
    ids = stack.ids("\u2603")
    assert len(ids) > 1, "the demo's vocabulary has no snowman"

    async def play(player: Player) -> None:
        for token_id in ids:
            player.tokens([token_id])
            await player.taken()
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {"stream": True, "max_tokens": len(ids), "temperature": 0}
    if is_chat:
        answer = await stack.http.post(CHAT_URL, json=body | {"messages": [{"role": "user", "content": "s"}]})
        _, *deltas = [event["choices"][0]["delta"] for event in events(answer.text)]
        texts = [delta.get("content") for delta in deltas]
    else:
        answer = await stack.http.post(URL, json=body | {"prompt": [5]})
        texts = [event["choices"][0]["text"] for event in events(answer.text)]
    assert texts[: len(ids)] == [""] * (len(ids) - 1) + ["\u2603"]
