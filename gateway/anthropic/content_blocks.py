"""Build the content blocks of a message from a reply's pieces, with their events."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic_core import from_json

from gateway.chat.pieces import ReplyPieces, ToolCallDelta
from gateway.reply_format import EVENT_END


class ContentBlocks:
    """A message's blocks: thinking, text and tool use. At most the last one is open.

    Its methods return events; whoever writes a whole message reads ``blocks`` alone.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._is_open = False
        # The open block's text, or its input as JSON text; ``close`` joins them.
        self._texts: list[str] = []
        # The events of the open block's next part, up to the part.
        self._delta_head = b""

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, pieces: ReplyPieces) -> bytes:
        """Add what the reply gained."""
        events = b""
        if pieces.reasoning:
            if not self._is_in("thinking"):
                block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._open(block, "thinking_delta", "thinking")
            if self._shows_thinking:
                events += self._delta(pieces.reasoning)
        if pieces.content:
            if not self._is_in("text"):
                events += self._open({"type": "text", "text": ""}, "text_delta", "text")
            events += self._delta(pieces.content)
        for delta in pieces.tool_calls:
            events += self._add_call(delta)
        return events

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        block, text, events = self.blocks[-1], "".join(self._texts), b""
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            # Clients wait for a signature, with which Anthropic recognizes its own thinking.
            events = self._event("content_block_delta", {"delta": {"type": "signature_delta", "signature": ""}})
        return events + self._event("content_block_stop", {})

    def _add_call(self, delta: ToolCallDelta) -> bytes:
        events = b""
        if delta.id is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            events = self._open(block, "input_json_delta", "partial_json")
        if delta.arguments:
            events += self._delta(delta.arguments)
        return events

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self.blocks[-1]["type"] == kind

    def _open(self, block: dict[str, Any], delta_type: str, member: str) -> bytes:
        events = self.close()
        self._is_open = True
        self._texts = []
        self.blocks.append(block)
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        ) % (len(self.blocks) - 1, delta_type.encode(), member.encode())
        return events + self._event("content_block_start", {"content_block": block})

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        return b"%b%b}}%b" % (self._delta_head, orjson.dumps(text), EVENT_END)

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        return message_event(kind, {"index": len(self.blocks) - 1, **members})


def message_event(kind: str, members: dict[str, Any]) -> bytes:
    """Return one server-sent event, with its type as its name."""
    return b"event: %b\ndata: %b%b" % (kind.encode(), orjson.dumps({"type": kind, **members}), EVENT_END)


def _input(text: str) -> dict[str, Any]:
    """Return a tool's input; of a text that the token limit cut, what is certain."""
    value = from_json(text or "{}", allow_partial=True)
    return value if isinstance(value, dict) else {}
