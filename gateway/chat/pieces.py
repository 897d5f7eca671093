"""The pieces of one assistant's reply: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of one tool call; ``id`` and ``name`` come only with the call's first part.

    The ``arguments`` of all parts, joined, are the call's arguments as JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyPieces:
    """What one output's reply gained. Empty texts and no calls: nothing to show yet."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class ToolCall:
    """One whole tool call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


def whole_calls(deltas: tuple[ToolCallDelta, ...]) -> list[ToolCall]:
    """Return the calls that a reply's deltas make, in order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[delta.index].arguments += delta.arguments
    return calls
