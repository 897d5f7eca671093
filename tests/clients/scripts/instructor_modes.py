"""instructor in each of its modes for OpenAI's API.

Some modes force the form. The others leave it to the model, and a small one would miss it, so a
pattern in the request makes it write what a large one would.
"""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import server
from instructor import Mode
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
OBJECT = r'\{"city": "(Berlin|Paris|Rome)", "days": [1-7]\}'
CALL = r'<tool_call>\n\{"name": "Forecast", "arguments": ' + OBJECT + r"\}\n</tool_call>"
# The mode asks for any JSON object; the pattern stands in its place.
FREE = {
    Mode.JSON: {"response_format": None, "structured_outputs": {"regex": OBJECT}},
    Mode.MD_JSON: {"structured_outputs": {"regex": rf"```json\n{OBJECT}\n```"}},
    Mode.PARALLEL_TOOLS: {"structured_outputs": {"regex": rf"{CALL}\n{CALL}"}},
}


def ask(mode: Mode, body: dict[str, Any] | None = None) -> list[Forecast]:
    client = instructor.from_openai(openai.OpenAI(base_url=server.BASE_URL, api_key=server.KEY), mode=mode)
    has_several = mode is Mode.PARALLEL_TOOLS
    found = client.chat.completions.create(
        model=server.MODEL,
        messages=server.MESSAGES,
        response_model=Iterable[Forecast] if has_several else Forecast,
        max_tokens=200,
        max_retries=1,
        temperature=0,
        extra_body=body,
    )
    return list(found) if has_several else [found]


for mode in FORCED:
    (only,) = ask(mode)
    assert isinstance(only, Forecast), mode
for mode, body in FREE.items():
    found = ask(mode, body)
    assert len(found) == (2 if mode is Mode.PARALLEL_TOOLS else 1), mode
    assert all(isinstance(each, Forecast) for each in found), mode
