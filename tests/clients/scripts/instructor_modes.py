"""instructor in each of its modes for OpenAI's API.

Modes that force the form get a valid object. The others leave it to the model; a small one may miss
it, and then instructor's own complaint is what must come.
"""

from typing import Literal

import instructor
import openai
import server
from instructor import Mode
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    city: Literal["Berlin", "Paris", "Rome"]
    days: int = Field(ge=1, le=7)


FORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)
FREE = (Mode.JSON, Mode.MD_JSON, Mode.JSON_O1, Mode.PARALLEL_TOOLS)
try:
    from instructor.core.exceptions import InstructorError
except ImportError:
    from instructor.exceptions import InstructorError


def ask(mode: Mode) -> object:
    client = instructor.from_openai(openai.OpenAI(base_url=server.BASE_URL, api_key=server.KEY), mode=mode)
    kind = list[Forecast] if mode is Mode.PARALLEL_TOOLS else Forecast
    return client.chat.completions.create(
        model=server.MODEL, messages=server.MESSAGES, response_model=kind, max_tokens=200, max_retries=1
    )


for mode in FORCED:
    assert isinstance(ask(mode), Forecast), mode
for mode in FREE:
    try:
        ask(mode)
    except InstructorError as error:
        assert "400" not in str(error), (mode, error)
