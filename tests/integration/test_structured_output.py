"""Structured output through the whole stack, with real clients: a random model must follow."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import grpc
import httpx
import openai
import psutil
import pytest
from pydantic import BaseModel, ConfigDict, Field

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.integration.stack import Stack, assert_all_gone, running

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "an address"}]
PROMPT = "for i in range(10):\n"
PATTERN = r"[a-c]{3}-\d{2,4}( ok)?"
ENDLESS = {"type": "integer", "multipleOf": 99999989}


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    street: str = Field(max_length=12)
    number: int = Field(ge=0, le=9999)
    kind: Literal["home", "work"]
    tags: list[bool] = Field(max_length=3)


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ", "utf-8")
    log = tmp_path_factory.mktemp("structured") / "log"
    with running(checkpoint, log, "--chat-template", str(template)) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=None) as client:
        yield client


async def test_the_openai_sdk_gets_what_its_model_says(client: openai.AsyncOpenAI) -> None:
    for seed in range(6):
        answer = await client.chat.completions.parse(
            model="tiny",
            messages=MESSAGES,
            response_format=Address,
            seed=seed,
            temperature=0.5 + seed / 5,
            max_tokens=2000,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Address)
        assert choice.message.content is not None and choice.message.content.endswith("}")


async def test_streams_and_choices_are_whole_with_and_without_speculation(client: openai.AsyncOpenAI) -> None:
    texts: dict[bool, dict[int, str]] = {}
    for enabled in (True, False):
        stream = await client.completions.create(
            model="tiny",
            prompt=PROMPT,
            n=3,
            seed=5,
            max_tokens=2000,
            stream=True,
            extra_body={"guided_json": Address.model_json_schema(), "speculative": {"enabled": enabled}},
        )
        texts[enabled] = {}
        reasons = {}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[enabled][choice.index] = texts[enabled].get(choice.index, "") + choice.text
                reasons[choice.index] = choice.finish_reason
        assert reasons == dict.fromkeys(range(3), "stop")
    assert texts[True] == texts[False] and len(set(texts[True].values())) == 3
    for text in texts[True].values():
        Address.model_validate_json(text)


async def test_json_mode_gives_objects(client: openai.AsyncOpenAI) -> None:
    """A random model goes on and on: a cut answer is at least the beginning of an object."""
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=100, n=4
    )
    for choice in answer.choices:
        text = choice.message.content or ""
        assert text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


async def test_sglang_and_grpc_clients(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as http:
        for seed in range(4):
            sampling = {"regex": PATTERN, "sampling_seed": seed, "max_new_tokens": 60}
            body = (await http.post("/generate", json={"text": PROMPT, "sampling_params": sampling})).json()
            assert re.fullmatch(PATTERN, body["text"])
            assert body["meta_info"]["finish_reason"]["type"] == "stop"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        sampling = common_pb2.SamplingParams(regex=PATTERN, max_tokens=60, ignore_eos=True)
        text = ""
        async for response in stub.Generate(gateway_pb2.GenerateRequest(text=PROMPT, sampling=sampling)):
            text += response.chunk.text
        assert re.fullmatch(PATTERN, text)


async def test_a_hostile_schema_is_a_400_and_holds_nobody_up(client: openai.AsyncOpenAI) -> None:
    hostile = asyncio.create_task(
        client.completions.create(model="tiny", prompt=PROMPT, extra_body={"guided_json": ENDLESS})
    )
    num_served = 0
    while not hostile.done():
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8)
        num_served += 1
    with pytest.raises(openai.BadRequestError) as caught:
        await hostile
    assert caught.value.param == "guided_json" and "to compile" in caught.value.message
    # If the first one had waited for it, there would be no second.
    assert num_served > 1


async def test_unsupported_keywords_are_named(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert caught.value.param == "response_format" and "uniqueItems" in caught.value.message


@pytest.mark.slow
async def test_the_process_that_checks_grammars_goes_with_its_verifier(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, tmp_path / "log") as stack:
        body = {"prompt": "a", "guided_regex": "[ab]{3}"}
        async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as http:
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        (checker,) = stack.service("verifier").children()
        stack.descendants = stack.children()
        assert checker in stack.descendants
        folder = stack.runtime_folder()
        stack.process.terminate()
        stack.process.wait()
        psutil.wait_procs(stack.descendants)
        assert_all_gone(stack, folder)
    with running(checkpoint, tmp_path / "log2") as stack:
        async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as http:
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        verifier = stack.service("verifier")
        (checker,) = verifier.children()
        verifier.kill()
        psutil.wait_procs([checker])
