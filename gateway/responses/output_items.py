"""Build the output items of a response from a reply's pieces, with their events."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from gateway.chat.pieces import ReplyPieces, ToolCallDelta
from gateway.http import new_id
from gateway.responses.events import EventWriter

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputItems:
    """A response's items: reasoning, messages and calls. At most the last one is open.

    Its methods return events; whoever writes a whole response reads ``items`` alone.
    """

    def __init__(self, events: EventWriter) -> None:
        self.items: list[dict[str, Any]] = []
        self._events = events
        self._is_open = False
        # The open item's text or arguments so far; ``close`` joins them.
        self._texts: list[str] = []
        # The events of the open item's next part, up to the part.
        self._delta_head = b""

    def add(self, pieces: ReplyPieces, logprobs: list[dict[str, Any]]) -> bytes:
        """Add what the reply gained; ``logprobs`` are of the tokens of its content."""
        events = b""
        if pieces.reasoning:
            events += self._add_reasoning(pieces.reasoning)
        if pieces.content:
            events += self._add_text(pieces.content, logprobs)
        for delta in pieces.tool_calls:
            events += self._add_call(delta)
        return events

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Add the logprobs of tokens after the content's text, such as the token that ends it."""
        if self._is_in("message"):
            self.items[-1]["content"][0]["logprobs"] += logprobs

    def close(self, status: ItemStatus = "completed") -> bytes:
        """End the open item, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            members = {"item_id": item["id"], "output_index": self._index, "arguments": text}
            events = self._events.write("response.function_call_arguments.done", members)
        else:
            (part,) = item["content"]
            part["text"] = text
            done = {"text": text} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            events = self._events.write(f"response.{part['type']}.done", {**self._place, **done})
            events += self._events.write("response.content_part.done", {**self._place, "part": part})
        return events + self._events.write("response.output_item.done", {"output_index": self._index, "item": item})

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """Where the only part of the open item is."""
        return {"item_id": self.items[-1]["id"], "output_index": self._index, "content_index": 0}

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        events = b""
        if not self._is_in("message"):
            events = self._open({"id": new_id("msg", "_"), "type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._open_part(part)
        if not logprobs:
            return events + self._delta(text, b',"logprobs":[]')
        self.items[-1]["content"][0]["logprobs"] += logprobs
        return events + self._delta(text, b',"logprobs":%b' % orjson.dumps(logprobs))

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        if not self._is_in("reasoning"):
            events = self._open({"id": new_id("rs", "_"), "type": "reasoning", "summary": [], "content": []})
            events += self._open_part({"type": "reasoning_text", "text": ""})
        return events + self._delta(text)

    def _add_call(self, delta: ToolCallDelta) -> bytes:
        events = b""
        if delta.id is not None:
            call = {"id": new_id("fc", "_"), "type": "function_call", "call_id": delta.id, "name": delta.name}
            events = self._open({**call, "arguments": ""})
            members = {"item_id": self.items[-1]["id"], "output_index": self._index}
            self._delta_head = self._events.head("response.function_call_arguments.delta", members)
        if delta.arguments:
            events += self._delta(delta.arguments)
        return events

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _open(self, item: dict[str, Any]) -> bytes:
        events = self.close()
        self._is_open = True
        self._texts = []
        self.items.append({**item, "status": "in_progress"})
        members = {"output_index": self._index, "item": self.items[-1]}
        return events + self._events.write("response.output_item.added", members)

    def _open_part(self, part: dict[str, Any]) -> bytes:
        self._delta_head = self._events.head(f"response.{part['type']}.delta", self._place)
        events = self._events.write("response.content_part.added", {**self._place, "part": part})
        self.items[-1]["content"].append(part)
        return events

    def _delta(self, text: str, more: bytes = b"") -> bytes:
        self._texts.append(text)
        return b'%b%b,"delta":%b%b' % (self._delta_head, more, orjson.dumps(text), self._events.end())
