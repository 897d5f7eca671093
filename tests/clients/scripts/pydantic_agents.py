"""pydantic-ai: an agent with a tool, an agent with a typed answer, and a stream."""

import asyncio
from typing import Literal

import server
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

model = OpenAIChatModel(server.MODEL, provider=OpenAIProvider(base_url=server.BASE_URL, api_key=server.KEY))
settings = ModelSettings(max_tokens=200, temperature=0)


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


typed = Agent(model, output_type=Forecast, model_settings=settings)
assert isinstance(typed.run_sync(server.QUESTION).output, Forecast)

plain = Agent(model, model_settings=ModelSettings(max_tokens=40, temperature=0))


@plain.tool_plain
def get_weather(city: Literal["Berlin", "Paris", "Rome"]) -> str:
    """Get a forecast."""
    return f"sunny in {city}"


# Whether a small model calls the tool is its own affair; the exchange must hold in either case.
assert isinstance(plain.run_sync(server.QUESTION).output, str)


async def stream() -> str:
    async with Agent(model, model_settings=ModelSettings(max_tokens=40, temperature=0)).run_stream(
        server.QUESTION
    ) as result:
        return await result.get_output()


assert asyncio.run(stream()).strip() == server.chat_text(40).strip()
