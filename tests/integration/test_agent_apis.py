"""One prompt over chat, responses and messages: the demo model's text is the same everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.integration.stack import ROOT, Stack, running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
DEMO = ROOT / "models" / "demo" / "target"
MODEL = "demo"
QUESTION = "Write a function that adds two numbers."
NUM_TOKENS = 60
PLAIN: dict[str, Any] = {"speculative": {"enabled": False}}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    number: int = Field(ge=0, le=99)
    right: bool


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("agents") / "log"
    with running(DEMO, log, "--served-model-name", MODEL) as stack:
        yield stack


@pytest.fixture
async def openai_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=None) as client:
        yield client


@pytest.fixture
async def anthropic_client(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="none", timeout=None) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
@pytest.mark.parametrize("speculative", [{}, PLAIN])
async def test_one_prompt_gets_one_text(
    openai_client: openai.AsyncOpenAI,
    anthropic_client: anthropic.AsyncAnthropic,
    sampling: dict[str, Any],
    speculative: dict[str, Any],
) -> None:
    turn: Any = [{"role": "user", "content": QUESTION}]
    chat = await openai_client.chat.completions.create(
        model=MODEL, messages=turn, max_completion_tokens=NUM_TOKENS, extra_body={**sampling, **speculative}
    )
    text = chat.choices[0].message.content
    assert text and chat.usage is not None

    fields: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": NUM_TOKENS}
    response = await openai_client.responses.create(**fields, extra_body={**sampling, **speculative})
    assert response.output_text == text and response.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens
    async with openai_client.responses.stream(**fields, extra_body={**sampling, **speculative}) as events:
        deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text and len(deltas) > 1

    fields = {"model": MODEL, "messages": turn, "max_tokens": NUM_TOKENS}
    message = await anthropic_client.messages.create(**fields, extra_body={**sampling, **speculative})
    assert [block.text for block in message.content if block.type == "text"] == [text]
    async with anthropic_client.messages.stream(**fields, extra_body={**sampling, **speculative}) as stream:
        assert await stream.get_final_text() == text
        final = await stream.get_final_message()
    for usage in (message.usage, final.usage):
        assert usage.output_tokens == chat.usage.completion_tokens
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens


async def test_structured_output_follows_its_schema(
    openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    parsed = await openai_client.responses.parse(model=MODEL, input=QUESTION, text_format=Answer, temperature=0)
    turn: Any = [{"role": "user", "content": QUESTION}]
    message = await anthropic_client.messages.parse(
        model=MODEL, max_tokens=100, messages=turn, output_format=Answer, extra_body={"temperature": 0}
    )
    assert isinstance(parsed.output_parsed, Answer)
    assert message.parsed_output == parsed.output_parsed


@pytest.mark.parametrize("speculative", [{}, PLAIN])
async def test_a_forced_call_has_one_set_of_arguments(
    openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic, speculative: dict[str, Any]
) -> None:
    turn: Any = [{"role": "user", "content": QUESTION}]
    schema = Answer.model_json_schema()
    function: Any = {"name": "answer", "description": "Takes the answer.", "parameters": schema}
    extra = {"temperature": 0, **speculative}
    chat = await openai_client.chat.completions.create(
        model=MODEL,
        messages=turn,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body=extra,
    )
    (call,) = chat.choices[0].message.tool_calls or []
    assert call.type == "function"
    expected = Answer.model_validate_json(call.function.arguments)

    response = await openai_client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[{"type": "function", "strict": None, **function}],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body=extra,
    )
    (item,) = response.output
    assert item.type == "function_call" and item.arguments == call.function.arguments

    async with anthropic_client.messages.stream(
        model=MODEL,
        max_tokens=500,
        messages=turn,
        tools=[{"name": "answer", "description": "Takes the answer.", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "answer", "disable_parallel_tool_use": True},
        extra_body=extra,
    ) as stream:
        message = await stream.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use" and Answer.model_validate(block.input) == expected
    assert message.stop_reason == "tool_use"
