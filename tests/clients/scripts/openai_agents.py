"""openai-agents: an agent that must call a tool, over chat completions and over Responses."""

import asyncio
from typing import Literal

import openai
import server
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=server.BASE_URL, api_key=server.KEY)
called = []


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


# A small model may call it again and again: it has one call in each run.
@function_tool(is_enabled=lambda context, agent: not called)
def get_weather(city: Literal["Berlin", "Paris", "Rome"]) -> str:
    """Get a forecast."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        called.clear()
        agent = Agent(
            name="forecaster",
            model=kind(model=server.MODEL, openai_client=client),
            tools=[get_weather],
            output_type=Forecast,
            # The agent goes back to "auto" after the first call.
            model_settings=ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=100, temperature=0
            ),
        )
        result = await Runner.run(agent, server.QUESTION, max_turns=4)
        assert len(called) == 1, kind
        assert isinstance(result.final_output, Forecast), kind


asyncio.run(main())
