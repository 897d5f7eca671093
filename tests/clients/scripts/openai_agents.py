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

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=server.BASE_URL, api_key=server.KEY)
called = []


@function_tool
def get_weather(city: Literal["Berlin", "Paris", "Rome"]) -> str:
    """Get a forecast."""
    called.append(city)
    return f"sunny in {city}"


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="forecaster",
            model=kind(model=server.MODEL, openai_client=client),
            tools=[get_weather],
            # The agent goes back to "auto" after the first call.
            model_settings=ModelSettings(tool_choice="required", max_tokens=100, temperature=0),
        )
        before = len(called)
        result = await Runner.run(agent, server.QUESTION, max_turns=4)
        assert len(called) > before, kind
        assert isinstance(result.final_output, str)


asyncio.run(main())
