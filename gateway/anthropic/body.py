"""Parse the bodies of POST /v1/messages and its count_tokens, and turn them into a chat's body."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from foretoken.errors import InvalidRequestError
from gateway.anthropic.tools import chat_tool_choice, chat_tools
from gateway.anthropic.turns import conversation
from gateway.chat.field_names import FieldNames
from gateway.fields import Fields, check_in_range, validate
from gateway.openai.request import SharedFields
from gateway.unsupported_fields import UNSUPPORTED

# Hints and accounting for Anthropic's own service.
IGNORED = frozenset(
    {
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }
)
# Fields that cannot be obeyed, with the reason.
UNSUPPORTED_HERE = {
    **UNSUPPORTED,
    "container": "this server runs no tools",
    "mcp_servers": "this server runs no tools",
}


class ThinkingFields(Fields):
    """Whether the model thinks before it answers, where its template lets a request choose."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted leaves the text of thinking blocks out; a summary is never made."
    )


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensFields(SharedFields):
    """Body of POST /v1/messages/count_tokens: all that decides the prompt."""

    model: str | None = None
    messages: list[Any] = Field(description="Turns with content blocks of text, thinking, tool_use and tool_result.")
    system: Any = Field(None, description="A string, or a list of text blocks.")
    tools: list[Any] = Field(default_factory=list, description="Tools with an input_schema.")
    tool_choice: Any = Field(None, description="An object of type auto, any, tool or none.")
    thinking: ThinkingFields | None = None
    output_config: OutputConfig = OutputConfig()
    # The older name of output_config.format.
    output_format: OutputFormat | None = None
    # vLLM's extension.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesFields(CountTokensFields):
    """Body of POST /v1/messages. Ranges: foretoken/limits.py."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False


FieldsT = TypeVar("FieldsT", bound=CountTokensFields)


@dataclass(frozen=True, slots=True)
class MessagesBody(Generic[FieldsT]):
    """A checked body, as a chat's body with the names that its fields have here."""

    fields: FieldsT
    chat: dict[str, Any]
    names: FieldNames


def parse_messages(body: dict[str, Any]) -> MessagesBody[MessagesFields]:
    """Return the parts of a body. Raises InvalidRequestError naming the field at fault."""
    parsed = _parse(MessagesFields, body)
    fields = parsed.fields
    check_in_range("max_tokens", fields.max_tokens)
    chat: dict[str, Any] = {"max_completion_tokens": fields.max_tokens, "stream": fields.stream}
    chat |= {name: getattr(fields, name) for name in ("temperature", "top_p") if name in fields.model_fields_set}
    if fields.stop_sequences:
        chat["stop"] = fields.stop_sequences
    return MessagesBody(fields, parsed.chat | chat, parsed.names)


def parse_count_tokens(body: dict[str, Any]) -> MessagesBody[CountTokensFields]:
    """Return the parts of a body. Raises InvalidRequestError naming the field at fault."""
    # Clients send the body of a message.
    not_counted = MessagesFields.model_fields.keys() - CountTokensFields.model_fields.keys()
    return _parse(CountTokensFields, body, IGNORED | not_counted)


def _parse(kind: type[FieldsT], body: dict[str, Any], ignored: Collection[str] = IGNORED) -> MessagesBody[FieldsT]:
    fields = validate(kind, body, ignored=ignored, unsupported=UNSUPPORTED_HERE)
    talk = conversation(fields.system, fields.messages)
    output_format = fields.output_config.format or fields.output_format
    if fields.output_config.format is not None and fields.output_format is not None:
        raise InvalidRequestError("output_format asks for a second form of the output", field="output_format")
    chat = {
        "model": fields.model,
        "messages": talk.messages,
        "response_format": _response_format(output_format),
        "reasoning_effort": fields.output_config.effort,
        "chat_template_kwargs": {**_thinking(fields.thinking), **fields.chat_template_kwargs} or None,
        "tools": chat_tools(fields.tools) or None,
        **{name: body[name] for name in SharedFields.model_fields if name in body},
    }
    if talk.is_continued:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    chat |= chat_tool_choice(fields.tool_choice)
    names = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_format" if fields.output_format else "output_config.format",
        "reasoning_effort": "output_config.effort",
        **{f"tools.{number}.function": f"tools.{number}" for number in range(len(fields.tools))},
        **talk.names,
    }
    return MessagesBody(fields, {name: value for name, value in chat.items() if value is not None}, FieldNames(names))


def _thinking(fields: ThinkingFields | None) -> dict[str, Any]:
    """Return the template's variables: Qwen's and others' name, and DeepSeek's and Granite's."""
    if fields is None:
        return {}
    thinks = fields.type != "disabled"
    budget = {} if fields.budget_tokens is None else {"thinking_budget": fields.budget_tokens}
    return {"enable_thinking": thinks, "thinking": thinks, **budget}


def _response_format(fields: OutputFormat | None) -> dict[str, Any] | None:
    return None if fields is None else {"type": "json_schema", "json_schema": {"schema": fields.schema_}}
