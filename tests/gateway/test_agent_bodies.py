"""Whatever stands in a body of /v1/responses or /v1/messages, it is a chat or a complaint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.errors import InvalidRequestError
from gateway.anthropic.body import IGNORED, CountTokensFields, MessagesFields, parse_count_tokens, parse_messages
from gateway.fields import Fields
from gateway.openai.request import parse_chat, template_messages
from gateway.responses.body import ResponsesFields, parse_responses
from gateway.sampling_defaults import SamplingDefaults

WORDS = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "id",
    "call_id",
    "input",
    "output",
    "arguments",
    "message",
    "user",
    "assistant",
    "system",
    "function_call",
    "tool_use",
    "tool_result",
    "thinking",
    "reasoning",
    "reasoning_text",
    "input_text",
    "function",
    "custom",
    "auto",
    "any",
    "allowed_tools",
    "json_schema",
    "schema",
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner), max_leaves=8
)
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ],
    "instructions": "e",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "g", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"h": "i"},
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": ""},
                {"type": "tool_use", "id": "d", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d", "content": "e"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["g"],
}


PARSERS: list[tuple[dict[str, Any], list[tuple[Callable[[dict[str, Any]], Any], type[Fields]]]]] = [
    (RESPONSES, [(parse_responses, ResponsesFields)]),
    (MESSAGES, [(parse_messages, MessagesFields), (parse_count_tokens, CountTokensFields)]),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a body: its container and its key."""
    found: list[tuple[Any, Any]] = []
    for key, inner in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += places(inner)
    return found


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(st.data(), st.sampled_from(PARSERS))
def test_no_value_at_any_place_is_a_fault(data: st.DataObject, chosen: tuple[dict[str, Any], Any]) -> None:
    example, parsers = chosen
    body = copy.deepcopy(example)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(body)))
        container[key] = data.draw(VALUES)
    try:
        body = orjson.loads(orjson.dumps(body))
    except orjson.JSONEncodeError:
        # No client can send such a value.
        return
    for parse, kind in parsers:
        try:
            parsed = parse(copy.deepcopy(body))
            with parsed.names.in_errors():
                fields, _ = parse_chat(parsed.chat, SamplingDefaults())
                template_messages(fields.messages)
        except InvalidRequestError as error:
            assert error.message
            # A complaint names a field of the body, if it names one.
            assert error.field.partition(".")[0] in ("", *kind.model_fields, *IGNORED), error.field


def test_the_examples_themselves_are_chats() -> None:
    for example, parsers in PARSERS:
        for parse, _ in parsers:
            fields, _ = parse_chat(parse(example).chat, SamplingDefaults())
            assert fields.messages and fields.tools and fields.response_format
