"""instructor in each of its modes for OpenAI's API.

Modes that force the form get a valid object. The others leave it to the model; a small one may miss
it, and then instructor's own complaint is what must come.
"""

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
import server
from instructor import Mode
from instructor.core.exceptions import InstructorError
from pydantic import BaseModel, ConfigDict, Field


class Forecast(BaseModel):
    # Without this, the schema admits any other keys, and the model may write them to the limit.
    model_config = ConfigDict(extra="forbid")
    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


FORCED = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
FREE = (Mode.JSON, Mode.MD_JSON, Mode.PARALLEL_TOOLS)


def ask(mode: Mode) -> object:
    client = instructor.from_openai(openai.OpenAI(base_url=server.BASE_URL, api_key=server.KEY), mode=mode)
    kind = Iterable[Forecast] if mode is Mode.PARALLEL_TOOLS else Forecast
    return client.chat.completions.create(
        model=server.MODEL, messages=server.MESSAGES, response_model=kind, max_tokens=200, max_retries=1, temperature=0
    )


for mode in FORCED:
    assert isinstance(ask(mode), Forecast), mode
for mode in FREE:
    try:
        ask(mode)
    except InstructorError as error:
        # Not the server's refusal, which instructor also wraps.
        assert "Error code" not in str(error), (mode, error)
