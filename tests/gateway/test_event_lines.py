"""A stream's events reach clients that end lines at more than
newlines, such as httpx.Response.iter_lines.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.gateway.conftest import MODEL, Stack
from tests.gateway.scripted_verifier import STOP, steps

pytestmark = pytest.mark.anyio
# Next line, line separator and paragraph separator.
TEXT = "a\x85b\u2028c\u2029d"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "model": MODEL, "max_tokens": 64}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_events_have_no_other_line_ends(stack: Stack, url: str, body: dict[str, Any]) -> None:
    tokens = stack.ids(TEXT)
    stack.verifier.script = steps(tokens[:2], tokens[2:], reason=STOP)
    async with stack.http.stream("POST", url, json={**body, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.status_code == 200
    assert all(line.startswith(("data: ", "event: ")) for line in lines), lines
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    values = [orjson.loads(value) for value in data if value != "[DONE]"]
    shown = orjson.dumps(values).decode()
    assert all(character in shown for character in "\x85\u2028\u2029")
