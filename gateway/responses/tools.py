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


def chat_tool_choice(choice: object, tools: list[dict[str, Any]]) -> tuple[object, list[dict[str, Any]]]:
    """Return a chat's tool choice, and which of its tools the model sees."""
    if choice is None or isinstance(choice, str):
        return choice, tools
    match kind := member(choice, "type", "tool_choice"):
        case "function":
            return {"type": "function", "function": {"name": member(choice, "name", "tool_choice")}}, tools
        case "allowed_tools":
            assert isinstance(choice, dict)
            names = _allowed_names(choice.get("tools"))
            return member(choice, "mode", "tool_choice"), [
                tool for tool in tools if tool["function"].get("name") in names
            ]
        case _:
            raise InvalidRequestError(
                f"tool_choice of type {kind[:64]!r} is not supported; this server takes auto, none, required, a "
                "function and allowed_tools",
                field="tool_choice.type",
            )


def _allowed_names(tools: object) -> set[str]:
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError("tool_choice.tools must be a list of functions", field="tool_choice.tools")
    return {member(tool, "name", f"tool_choice.tools.{number}") for number, tool in enumerate(tools)}
