"""Build a chat's messages from the turns of other APIs, and remember where each one came from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from foretoken import limits
from foretoken.errors import InvalidRequestError


class Conversation:
    """Messages in the form of POST /v1/chat/completions.

    Each method takes the field at which the API's own body has the turn. What an assistant says in
    several turns (reasoning, text, calls) becomes one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        # Chat field -> the API's own field.
        self.names: dict[str, str] = {}

    def system(self, text: str, field: str) -> None:
        """Add a system text; those at the start become one message, as many templates want it."""
        if self.messages and all(message["role"] == "system" for message in self.messages):
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self._add({"role": "system", "content": text}, field)

    def user(self, text: str, field: str, *, joins: bool = False) -> None:
        """Add a user's text; one that ``joins`` continues a user's message before it."""
        if joins and self._last_role == "user":
            self.messages[-1]["content"] += f"\n{text}"
        else:
            self._add({"role": "user", "content": text}, field)

    def reasoning(self, text: str, field: str) -> None:
        """Add what the assistant thought before it spoke or called."""
        message = self._assistant(field, after=("content", "tool_calls"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def assistant(self, text: str, field: str, *, joins: bool = False) -> None:
        """Add what the assistant said; a text that ``joins`` continues one before it."""
        message = self._assistant(field, after=("tool_calls",) if joins else ("content", "tool_calls"))
        message["content"] = message.get("content", "") + text

    def call(self, call_id: str, name: str, arguments: str, field: str) -> None:
        """Add the assistant's call of a function, with its arguments as JSON text."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(field).setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str, field: str) -> None:
        """Add what a called function returned."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, field)

    @property
    def is_continued(self) -> bool:
        """Return whether the assistant has begun a message that it is to continue."""
        return self._last_role == "assistant"

    @property
    def _last_role(self) -> str:
        return str(self.messages[-1]["role"]) if self.messages else ""

    def _assistant(self, field: str, *, after: Collection[str] = ()) -> dict[str, Any]:
        """Return the assistant's message that goes on.

        It is a new one if it has a member of ``after``.
        """
        if self._last_role != "assistant" or any(name in self.messages[-1] for name in after):
            self._add({"role": "assistant"}, field)
        return self.messages[-1]

    def _add(self, message: dict[str, Any], field: str) -> None:
        self.names[f"messages.{len(self.messages)}"] = field
        self.messages.append(message)


def part_texts(content: object, field: str, kinds: Collection[str]) -> list[str]:
    """Return the texts of a content: a string, or parts whose ``type`` is one of ``kinds``.

    Raises InvalidRequestError for other content.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{field} must be a string or a list of parts", field=field)
    limits.check_count(field, len(content), limits.MAX_CONTENT_PARTS)
    texts = []
    for number, part in enumerate(content):
        kind = member(part, "type", f"{field}.{number}")
        if kind not in kinds:
            raise InvalidRequestError(
                f"{field}.{number}: type {kind[:64]!r} is not supported; this server takes text",
                field=f"{field}.{number}.type",
            )
        texts.append(member(part, "refusal" if kind == "refusal" else "text", f"{field}.{number}"))
    return texts


def member(value: object, name: str, field: str) -> str:
    """Return a string that an object must hold. Raises InvalidRequestError naming its field."""
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field} must be an object with a string {name!r}", field=f"{field}.{name}")
    return text
