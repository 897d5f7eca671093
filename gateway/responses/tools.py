"""Turn the tools and the tool choice of POST /v1/responses into a chat's."""

from __future__ import annotations

from typing import Any

from foretoken.errors import InvalidRequestError
from gateway.chat.conversation import member

# The fields of a function that a chat knows too. The others are about OpenAI's own service.
_OF_FUNCTION = ("name", "description", "parameters", "strict")


def chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Return a chat's tools. Raises InvalidRequestError for a tool that is not a function."""
    converted = []
    for number, tool in enumerate(tools):
        field = f"tools.{number}"
        kind = member(tool, "type", field)
        if kind != "function":
            raise InvalidRequestError(
                f"{field}: tools of type {kind[:64]!r} are not supported; this server takes functions",
                field=f"{field}.type",
            )
        function = {name: tool[name] for name in _OF_FUNCTION if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def chat_tool_choice(choice: object) -> object:
    """Return a chat's tool choice. Raises InvalidRequestError for an unknown type."""
    if choice is None or isinstance(choice, str):
        return choice
    match kind := member(choice, "type", "tool_choice"):
        case "function":
            return {"type": "function", "function": {"name": member(choice, "name", "tool_choice")}}
        case "allowed_tools":
            allowed = {name: value for name, value in choice.items() if name != "type"}  # type: ignore[attr-defined]
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            raise InvalidRequestError(
                f"tool_choice of type {kind[:64]!r} is not supported; this server takes auto, none, required, a "
                "function and allowed_tools",
                field="tool_choice.type",
            )
