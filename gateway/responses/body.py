"""Parse the body of POST /v1/responses, and turn it into the body of a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.chat.field_names import FieldNames
from gateway.fields import Fields, check_in_range, validate
from gateway.openai.request import SharedFields
from gateway.responses.input_items import conversation
from gateway.responses.tools import chat_tool_choice, chat_tools
from gateway.unsupported_fields import UNSUPPORTED

LOGPROBS = "message.output_text.logprobs"
# A reasoning item's text stands in its content, so the next request can carry it on without this.
ENCRYPTED_REASONING = "reasoning.encrypted_content"

# Hints and accounting for OpenAI's own service.
IGNORED = frozenset(
    {
        "access_programs",
        "background_options",
        "client_metadata",
        "image",
        "max_tool_calls",
        "prompt_cache_options",
        "stream_options",
    }
)
# Fields that cannot be obeyed, with the reason: most ask for a server that keeps responses.
UNSUPPORTED_HERE = {
    **UNSUPPORTED,
    "background": "this server answers a request while its client waits",
    "context_management": "this server compacts no context",
    "conversation": "this server keeps no conversations; send the whole conversation as input",
    "moderation": "this server moderates nothing",
    "previous_response_id": "this server keeps no responses; send the whole conversation as input",
    "prompt": "this server keeps no prompts; send instructions and input",
    "store": "this server keeps no responses; leave store out or send false",
}


class TextFormat(Fields):
    """``text.format``; a schema's output follows it, whatever ``strict`` says."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFields(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(Fields):
    """Only ``effort`` has a use: what the model thinks is returned in full, never summarized."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesFields(SharedFields):
    """Body of POST /v1/responses. Ranges: foretoken/limits.py."""

    model: str | None = None
    input: Any = Field(
        description="A string, or a list of items of type message, function_call, function_call_output or reasoning."
    )
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int | None = None
    tools: list[Any] = Field(default_factory=list, description="Tools of type function.")
    tool_choice: Any = Field(None, description="auto, none, required, a function or allowed_tools.")
    parallel_tool_calls: bool = True
    text: TextFields = TextFields()
    reasoning: ReasoningFields = ReasoningFields()
    include: list[str] = Field(default_factory=list, description=f"{LOGPROBS} and {ENCRYPTED_REASONING}.")
    truncation: Literal["auto", "disabled"] = "disabled"
    stream: bool = False
    # Stateless: only false is taken.
    store: bool = False
    background: bool = False
    # Echoed in the answer.
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    # vLLM's extensions.
    stop: Any = Field(None, description="A string, or a list of strings.")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResponsesBody:
    """A checked body, as a chat's body with the names that its fields have here."""

    fields: ResponsesFields
    chat: dict[str, Any]
    names: FieldNames


def parse_responses(body: dict[str, Any]) -> ResponsesBody:
    """Return the parts of a body. Raises InvalidRequestError naming the field at fault."""
    nested = {name: _without_nulls(body[name]) for name in ("text", "reasoning") if name in body}
    fields = validate(ResponsesFields, body | nested, ignored=IGNORED, unsupported=UNSUPPORTED_HERE)
    _check(fields)
    talk = conversation(fields.instructions, fields.input)
    chat = {
        "model": fields.model,
        "messages": talk.messages,
        "max_completion_tokens": fields.max_output_tokens,
        "temperature": fields.temperature if "temperature" in fields.model_fields_set else None,
        "top_p": fields.top_p if "top_p" in fields.model_fields_set else None,
        "stop": fields.stop,
        "stream": fields.stream,
        "response_format": _response_format(fields.text.format),
        "reasoning_effort": fields.reasoning.effort,
        "chat_template_kwargs": fields.chat_template_kwargs or None,
        "tools": chat_tools(fields.tools) or None,
        "tool_choice": chat_tool_choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls,
        **_logprobs(fields),
        **{name: body[name] for name in SharedFields.model_fields if name in body},
    }
    names = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        **{f"tools.{number}.function": f"tools.{number}" for number in range(len(fields.tools))},
        **talk.names,
    }
    return ResponsesBody(fields, {name: value for name, value in chat.items() if value is not None}, FieldNames(names))


def _without_nulls(value: object) -> object:
    """Remove nulls, which clients send for what they leave out."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None}


def _check(fields: ResponsesFields) -> None:
    check_in_range("max_output_tokens", fields.max_output_tokens, "max_tokens")
    check_in_range("top_logprobs", fields.top_logprobs, "logprobs")
    for name in fields.include:
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise InvalidRequestError(
                f"include: {name[:64]!r} is not supported; this server includes {LOGPROBS} and {ENCRYPTED_REASONING}",
                field="include",
            )
    limits.check_count("metadata", len(fields.metadata), limits.MAX_METADATA_PAIRS)
    for key, value in fields.metadata.items():
        limits.check_text("metadata", key, limits.MAX_METADATA_KEY_CHARS)
        limits.check_text("metadata", value, limits.MAX_METADATA_VALUE_CHARS)


def _logprobs(fields: ResponsesFields) -> dict[str, Any]:
    if LOGPROBS not in fields.include and not fields.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}


def _response_format(text: TextFormat | None) -> dict[str, Any] | None:
    if text is None or text.type == "text":
        return None
    if text.type == "json_object":
        return {"type": "json_object"}
    if text.schema_ is None:
        raise InvalidRequestError("text.format of type json_schema needs a schema", field="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": text.name, "schema": text.schema_}}
