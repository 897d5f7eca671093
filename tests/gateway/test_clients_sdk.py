"""The OpenAI SDK retries refused requests, and never a request that has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import openai
import pytest

from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.gateway.conftest import MODEL, Stack, run_stack
from tests.gateway.scripted_verifier import STOP, Player

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=2) as client:
        yield client


def refuse_first(stack: Stack, code: grpc.StatusCode) -> None:
    async def play(player: Player) -> None:
        if len(stack.verifier.submitted) == 1:
            player.error(code, "not now")
            return
        player.tokens(stack.ids("hello"))
        player.finish(STOP)

    stack.verifier.script = play


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_tried_again_and_answered_once(
    stack: Stack, client: openai.AsyncOpenAI, stream: bool
) -> None:
    refuse_first(stack, grpc.StatusCode.RESOURCE_EXHAUSTED)
    if stream:
        chunks = await client.completions.create(model=MODEL, prompt="a", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in chunks])
    else:
        text = (await client.completions.create(model=MODEL, prompt="a")).choices[0].text
    assert text == "hello"
    # The refused one, and one that ran.
    assert len(stack.verifier.submitted) == 2
    assert await stack.metric("foretoken_request_success_total", finished_reason="stop") == 1.0


async def test_the_gateways_own_limit_is_tried_again(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"max_concurrent_requests": 1})
    async for stack in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        release = asyncio.Event()

        async def play(player: Player, stack: Stack = stack, release: asyncio.Event = release) -> None:
            await release.wait()
            player.tokens(stack.ids("hello"))
            player.finish(STOP)

        stack.verifier.script = play
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=2) as client:
            calls = [asyncio.create_task(client.completions.create(model=MODEL, prompt="a")) for _ in range(2)]
            while not await stack.metric("foretoken_admission_rejections_total", reason="resource_exhausted"):
                await asyncio.sleep(0)
            release.set()
            assert [(await call).choices[0].text for call in calls] == ["hello"] * 2
        assert len(stack.verifier.submitted) == 2


async def test_a_stream_that_breaks_is_raised_and_not_doubled(stack: Stack, client: openai.AsyncOpenAI) -> None:
    answered = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello"))
        await answered.wait()
        player.error(grpc.StatusCode.INTERNAL, "broken")

    stack.verifier.script = play
    texts = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await client.completions.create(model=MODEL, prompt="a", stream=True):
            texts.append(chunk.choices[0].text)
            answered.set()
    assert not isinstance(caught.value, openai.APIStatusError)
    assert "".join(texts) == "hello"
    assert len(stack.verifier.submitted) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_passed_deadline_is_not_tried_again(stack: Stack, client: openai.AsyncOpenAI, stream: bool) -> None:
    """Another try would take as long again."""

    async def play(player: Player) -> None:
        player.error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    stack.verifier.script = play
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model=MODEL, prompt="a", stream=stream)
    assert caught.value.status_code == 504
    assert len(stack.verifier.submitted) == 1
