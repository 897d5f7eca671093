"""Read tools and tool calls from the body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from pydantic import ConfigDict

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.chat.tools import Tool, ToolChoice, ToolUse, checked_use
from gateway.fields import Fields
from gateway.json_depth import is_too_deep


class OpenFields(Fields):
    """Base of calls in earlier answers.

    Another server's may have more fields, which mean nothing.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class FunctionFields(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields):
    type: Literal["function"]
    function: FunctionFields


class FunctionCallFields(OpenFields):
    name: str
    arguments: Any = ""


class ToolCallFields(OpenFields):
    """One call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallFields


def tool_use(tools: list[ToolFields], choice: object, parallel: bool | None) -> ToolUse:
    """Return a request's tools and choice. Raises InvalidRequestError naming the field at fault."""
    known = tuple(
        Tool(f.name, f.description, f.parameters, f.strict or False) for f in (tool.function for tool in tools)
    )
    allowed, parsed = _choice(choice)
    use = checked_use(ToolUse(known, parsed, parallel is not False))
    if allowed is None:
        return use
    return checked_use(ToolUse(tuple(tool for tool in known if tool.name in allowed), parsed, use.parallel))


def template_calls(calls: list[ToolCallFields]) -> list[dict[str, Any]]:
    """Return an assistant's calls as chat templates expect them: arguments are objects."""
    return [
        {
            **({} if call.id is None else {"id": call.id}),
            "type": "function",
            "function": {"name": call.function.name, "arguments": arguments_object(call.function.arguments)},
        }
        for call in calls
    ]


def arguments_object(arguments: object) -> object:
    """Return a call's arguments as an object; what is none stays as the model wrote it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) and not is_too_deep(value) else arguments


def _choice(value: object) -> tuple[frozenset[str] | None, ToolChoice]:
    """Return the names that a choice allows, None for all, and the choice."""
    match value:
        case None:
            return None, ToolChoice()
        case "auto" | "none" | "required":
            return None, ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return None, ToolChoice("named", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return frozenset(map(_allowed_name, tools[: limits.MAX_TOOLS])), ToolChoice(mode)
    raise InvalidRequestError(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
        field="tool_choice",
    )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequestError("tool_choice: an allowed tool must name a function", field="tool_choice")
