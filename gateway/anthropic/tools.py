"""Turn the tools and the tool choice of POST /v1/messages into a chat's."""

from __future__ import annotations

from typing import Any

from foretoken.errors import InvalidRequestError
from gateway.chat.conversation import member

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Return a chat's tools.

    Raises InvalidRequestError for a tool that Anthropic runs or defines.
    """
    converted = []
    for number, tool in enumerate(tools):
        field = f"tools.{number}"
        name = member(tool, "name", field)
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequestError(
                f"{field}: tools of type {str(tool['type'])[:64]!r} are not supported; this server takes tools with "
                "an input_schema",
                field=f"{field}.type",
            )
        if not isinstance(tool.get("input_schema"), dict):
            raise InvalidRequestError(f"{field}.input_schema must be a JSON schema", field=f"{field}.input_schema")
        function = {"name": name, "parameters": tool["input_schema"]}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def chat_tool_choice(choice: object) -> dict[str, Any]:
    """Return a chat's ``tool_choice`` and ``parallel_tool_calls``, where the choice sets them.

    Raises InvalidRequestError for a choice that the API lacks.
    """
    if choice is None:
        return {}
    kind = member(choice, "type", "tool_choice")
    assert isinstance(choice, dict)
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    if kind == "tool":
        name = member(choice, "name", "tool_choice")
        return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}
    if kind not in _CHOICES:
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool or none, got {kind[:64]!r}", field="tool_choice.type"
        )
    return {"tool_choice": _CHOICES[kind], **parallel}
