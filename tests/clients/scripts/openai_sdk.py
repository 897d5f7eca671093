"""The OpenAI SDK for Python: chats, streams, tools, structured answers, Responses and errors."""

import asyncio
import json
from typing import Literal

import openai
import server
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=server.BASE_URL, api_key=server.KEY, max_retries=0)
expected = server.chat_text(40)
# Several calls could go on to the limit.
ONE_CALL = {"tools": [server.TOOL], "parallel_tool_calls": False, "max_tokens": 200}

chat = client.chat.completions.create(model=server.MODEL, messages=server.MESSAGES, max_tokens=40, temperature=0)
assert chat.choices[0].message.content == expected
assert chat.usage is not None and chat.usage.completion_tokens > 0

chunks = client.chat.completions.create(
    model=server.MODEL,
    messages=server.MESSAGES,
    max_tokens=40,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
parts = list(chunks)
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
assert parts[-1].usage is not None

for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
    call = client.chat.completions.create(model=server.MODEL, messages=server.MESSAGES, tool_choice=choice, **ONE_CALL)
    message = call.choices[0].message
    assert message.tool_calls and server.is_forecast(json.loads(message.tool_calls[0].function.arguments)), message
    # The history goes back as it came.
    again = client.chat.completions.create(
        model=server.MODEL,
        messages=[
            *server.MESSAGES,
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        ],
        tools=[server.TOOL],
        tool_choice="none",
        max_tokens=8,
    )
    assert again.choices[0].message.content is not None

with client.chat.completions.stream(
    model=server.MODEL, messages=server.MESSAGES, tool_choice="required", **ONE_CALL
) as stream:
    final = stream.get_final_completion()
assert server.is_forecast(json.loads(final.choices[0].message.tool_calls[0].function.arguments))


class Forecast(BaseModel):
    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


parsed = client.chat.completions.parse(
    model=server.MODEL, messages=server.MESSAGES, response_format=Forecast, max_tokens=100
)
assert isinstance(parsed.choices[0].message.parsed, Forecast)

response = client.responses.create(model=server.MODEL, input=server.QUESTION, max_output_tokens=40, temperature=0)
assert response.output_text == expected
with client.responses.stream(model=server.MODEL, input=server.QUESTION, max_output_tokens=40, temperature=0) as events:
    seen = list(events)
assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == expected
assert seen[-1].type == "response.incomplete" and seen[-1].response.output_text == expected
with client.responses.stream(
    model=server.MODEL, input=server.QUESTION, text_format=Forecast, max_output_tokens=100
) as events:
    assert isinstance(events.get_final_response().output_parsed, Forecast)

completion = client.completions.create(model=server.MODEL, prompt="def add(a, b):", max_tokens=8, temperature=0)
assert completion.choices[0].text
assert server.MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(server.MODEL).id == server.MODEL

try:
    client.chat.completions.create(model=server.MODEL, messages=[{"role": "user", "content": server.TOO_LONG}])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded", error
else:
    raise AssertionError("a prompt that is too long was taken")
try:
    client.chat.completions.create(model="no-such-model", messages=server.MESSAGES)
except openai.NotFoundError as error:
    assert error.code == "model_not_found", error
else:
    raise AssertionError("an unknown model was served")


async def many() -> None:
    async with openai.AsyncOpenAI(base_url=server.BASE_URL, api_key=server.KEY) as many_clients:
        answers = await asyncio.gather(
            *(
                many_clients.chat.completions.create(
                    model=server.MODEL, messages=server.MESSAGES, max_tokens=40, temperature=0
                )
                for _ in range(8)
            )
        )
    assert {answer.choices[0].message.content for answer in answers} == {expected}


asyncio.run(many())
