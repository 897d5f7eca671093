"""The tools that one request offers to the model, and which of them the model may call.

Plain values: the APIs' bodies convert into them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foretoken import limits
from foretoken.errors import InvalidRequestError

ChoiceMode = Literal["auto", "none", "required", "named"]
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function; ``parameters`` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    # None: the client gave no schema, so the function takes no arguments.
    parameters: Mapping[str, Any] | None = None
    # The arguments always follow the schema, even where the model is free to call or not.
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments: always an object's."""
        if self.parameters is None:
            return NO_PARAMETERS
        return self.parameters if "type" in self.parameters else {**self.parameters, "type": "object"}

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: OpenAI's shape of a function."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """How the model chooses: ``named`` calls the function ``name``, ``required`` at least one."""

    mode: ChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools, its choice, and whether one reply may hold several calls."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model sees: none if it may not call any."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the reply may call."""
        if self.choice.mode == "named":
            return tuple(tool for tool in self.tools if tool.name == self.choice.name)
        return self.offered

    @property
    def must_call(self) -> bool:
        return self.choice.mode in ("required", "named")


def checked_use(use: ToolUse) -> ToolUse:
    """Return the tools of a request. Raises InvalidRequestError naming the field at fault."""
    limits.check_count("tools", len(use.tools), limits.MAX_TOOLS)
    names: set[str] = set()
    for number, tool in enumerate(use.tools):
        _check(tool, f"tools.{number}")
        if tool.name in names:
            raise InvalidRequestError(f"tools has two functions named {tool.name!r}", field="tools")
        names.add(tool.name)
    if use.must_call and not use.tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice")
    if use.choice.mode == "named" and use.choice.name not in names:
        raise InvalidRequestError(
            f"tool_choice names {str(use.choice.name)[:64]!r}, which is not in tools", field="tool_choice"
        )
    return use


def _check(tool: Tool, field: str) -> None:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequestError(
            f"{field}: a function's name must have 1 to {limits.MAX_TOOL_NAME_CHARS} of a-z, A-Z, 0-9, '_', '-' "
            f"and '.', got {tool.name[:64]!r}",
            field=field,
        )
    limits.check_text(field, tool.description or "", limits.MAX_TOOL_DESCRIPTION_CHARS)
    if tool.schema["type"] != "object":
        raise InvalidRequestError(f"{field}: parameters must be the JSON schema of an object", field=field)
