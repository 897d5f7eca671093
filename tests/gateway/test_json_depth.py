"""Deeply nested bodies are refused, whatever their strings hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.limits import MAX_JSON_DEPTH
from gateway.json_depth import is_too_deep
from tests.gateway.conftest import Stack

TEXTS = st.text(alphabet='[]{}"\\a', max_size=8)


def nested(depth: int, text: str = "") -> Any:
    value: Any = text
    for number in range(depth):
        value = {text: value, "b": [] if number else 0} if number % 2 else [value, text]
    return value


@given(TEXTS, st.integers(0, 2 * MAX_JSON_DEPTH))
def test_only_the_depth_decides(text: str, depth: int) -> None:
    assert is_too_deep(nested(depth, text)) == (depth > MAX_JSON_DEPTH)


def test_many_shallow_values_are_allowed() -> None:
    assert not is_too_deep([[{"[": "{"}]] * 5000)


@pytest.mark.anyio
@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH - 4, 300, 900])
async def test_deep_bodies_get_an_answer_or_a_400(stack: Stack, depth: int) -> None:
    deep, turn = nested(depth), {"role": "user", "content": "hi"}
    call = {"id": "a", "type": "function", "function": {"name": "x", "arguments": json.dumps({"a": deep})}}
    use = {"type": "tool_use", "id": "a", "name": "x", "input": {"a": deep}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    tool: dict[str, Any] = {"name": "x", "parameters": {"a": deep}}
    uses = [turn, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [turn, {"role": "assistant", "tool_calls": [call]}]}),
        ("/v1/chat/completions", {"messages": [turn], "tools": [{"type": "function", "function": tool}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **tool}], "tool_choice": "none"}),
        ("/v1/responses", {"input": "hi", "tool_choice": deep}),
        ("/v1/messages", {"max_tokens": 1, "messages": uses}),
        ("/v1/messages", {"max_tokens": 1, "messages": [turn], "tools": [{"name": "x", "input_schema": {"a": deep}}]}),
    ]
    for url, body in bodies:
        answer = await stack.http.post(url, content=json.dumps(body).encode())
        assert answer.status_code in (200, 400), (url, answer.text)
