"""Turn the input of POST /v1/responses into a chat's messages."""

from __future__ import annotations

from typing import Any

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.chat.conversation import Conversation, member, part_texts

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})


def conversation(instructions: str | None, value: object) -> Conversation:
    """Return the conversation of ``instructions`` and ``input``, a string or a list of items.

    Raises InvalidRequestError that names the field at fault.
    """
    talk = Conversation()
    if instructions is not None:
        talk.system(instructions, "instructions")
    if isinstance(value, str):
        talk.user(value, "input")
        return talk
    if not isinstance(value, list):
        raise InvalidRequestError("input must be a string or a list of items", field="input")
    limits.check_count("input", len(value), limits.MAX_CHAT_MESSAGES, least=1)
    for number, item in enumerate(value):
        field = f"input.{number}"
        if not isinstance(item, dict):
            raise InvalidRequestError(f"{field} must be an object", field=field)
        _add(talk, item, field)
    return talk


def _add(talk: Conversation, item: dict[str, Any], field: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(talk, item, field)
        case "function_call":
            call_id, name = member(item, "call_id", field), member(item, "name", field)
            talk.call(call_id, name, member(item, "arguments", field), field)
        case "function_call_output":
            text = "".join(part_texts(item.get("output"), f"{field}.output", _TEXT_PARTS))
            talk.result(member(item, "call_id", field), text, field)
        case "reasoning":
            _add_reasoning(talk, item, field)
        case "item_reference":
            raise InvalidRequestError(
                f"{field}: item_reference names a stored item, and this server stores none; send the item itself",
                field=f"{field}.type",
            )
        case kind:
            raise InvalidRequestError(
                f"{field}: items of type {str(kind)[:64]!r} are not supported; this server takes message, "
                "function_call, function_call_output and reasoning",
                field=f"{field}.type",
            )


def _add_message(talk: Conversation, item: dict[str, Any], field: str) -> None:
    text = "".join(part_texts(item.get("content"), f"{field}.content", _TEXT_PARTS))
    match member(item, "role", field):
        case "system" | "developer":
            talk.system(text, field)
        case "user":
            talk.user(text, field)
        case "assistant":
            talk.assistant(text, field)
        case role:
            raise InvalidRequestError(
                f"{field}.role must be system, developer, user or assistant, got {role[:64]!r}", field=f"{field}.role"
            )


def _add_reasoning(talk: Conversation, item: dict[str, Any], field: str) -> None:
    """Add the reasoning's text; one of another server may have only a text that it encrypted."""
    texts = part_texts(item.get("content") or [], f"{field}.content", {"reasoning_text"})
    if texts:
        talk.reasoning("".join(texts), field)
