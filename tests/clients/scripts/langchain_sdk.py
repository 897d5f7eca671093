"""langchain-openai: invoke, stream, tools, structured output, and a tool's result sent back."""

from typing import Literal

import server
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    base_url=server.BASE_URL, api_key=server.KEY, model=server.MODEL, temperature=0, max_tokens=40, stream_usage=True
)
expected = server.chat_text(40)
answer = model.invoke(server.QUESTION)
assert answer.content == expected and answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in model.stream(server.QUESTION)) == expected


@tool
def get_weather(city: Literal["Berlin", "Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Get a forecast."""
    return f"{days} sunny days in {city}"


calling = ChatOpenAI(base_url=server.BASE_URL, api_key=server.KEY, model=server.MODEL, temperature=0, max_tokens=200)
for choice in ("any", "get_weather"):
    bound = calling.bind_tools([get_weather], tool_choice=choice, strict=True)
    call = bound.invoke(server.QUESTION)
    assert call.tool_calls and call.tool_calls[0]["name"] == "get_weather", call
    result = get_weather.invoke(call.tool_calls[0]["args"])
    said = calling.bind_tools([get_weather], tool_choice="none").invoke(
        [HumanMessage(server.QUESTION), call, ToolMessage(result, tool_call_id=call.tool_calls[0]["id"])]
    )
    assert not said.tool_calls
    streamed = None
    for chunk in bound.stream(server.QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["name"] == "get_weather" and get_weather.invoke(streamed.tool_calls[0]["args"])


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


for method in ("json_schema", "function_calling"):
    found = calling.with_structured_output(Forecast, method=method).invoke(server.QUESTION)
    assert isinstance(found, Forecast), method
