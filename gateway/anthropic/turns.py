"""Turn the system prompt and the messages of POST /v1/messages into a chat's messages."""

from __future__ import annotations

from typing import Any

import orjson

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.chat.conversation import Conversation, member, part_texts

_TEXT = frozenset({"text"})


def conversation(system: object, messages: list[Any]) -> Conversation:
    """Return the conversation.

    Consecutive turns of one role are one turn, as Anthropic's API says.

    Raises InvalidRequestError that names the field at fault.
    """
    talk = Conversation()
    if system is not None:
        talk.system("\n".join(part_texts(system, "system", _TEXT)), "system")
    limits.check_count("messages", len(messages), limits.MAX_CHAT_MESSAGES, least=1)
    for number, message in enumerate(messages):
        field = f"messages.{number}"
        match member(message, "role", field):
            case "user":
                for block, place in _blocks(message, field):
                    _add_user_block(talk, block, place)
            case "assistant":
                for block, place in _blocks(message, field):
                    _add_assistant_block(talk, block, place)
            case "system":
                talk.system("\n".join(part_texts(message.get("content"), f"{field}.content", _TEXT)), field)
            case role:
                raise InvalidRequestError(
                    f"{field}.role must be user, assistant or system, got {role[:64]!r}", field=f"{field}.role"
                )
    if "tool_calls" in talk.messages[-1]:
        raise InvalidRequestError("messages ends with tool_use blocks that have no tool_result", field="messages")
    return talk


def _blocks(message: dict[str, Any], field: str) -> list[tuple[dict[str, Any], str]]:
    """Return a message's content blocks, each with its field; a string is one block of text."""
    content, field = message.get("content"), f"{field}.content"
    if isinstance(content, str):
        return [({"type": "text", "text": content}, field)]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{field} must be a string or a list of content blocks", field=field)
    limits.check_count(field, len(content), limits.MAX_CONTENT_PARTS)
    return [(block, f"{field}.{number}") for number, block in enumerate(content)]


def _add_user_block(talk: Conversation, block: dict[str, Any], field: str) -> None:
    match member(block, "type", field):
        case "text":
            talk.user(member(block, "text", field), field, joins=True)
        case "tool_result":
            content = block.get("content")
            texts = [] if content is None else part_texts(content, f"{field}.content", _TEXT)
            talk.result(member(block, "tool_use_id", field), "\n".join(texts), field)
        case kind:
            raise _unsupported(kind, field, "text and tool_result from a user")


def _add_assistant_block(talk: Conversation, block: dict[str, Any], field: str) -> None:
    match member(block, "type", field):
        case "text":
            talk.assistant(member(block, "text", field), field, joins=True)
        case "thinking":
            talk.reasoning(member(block, "thinking", field), field)
        case "redacted_thinking":
            # Nobody but Anthropic can read it.
            return
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise InvalidRequestError(f"{field}.input must be an object", field=f"{field}.input")
            call_id, name = member(block, "id", field), member(block, "name", field)
            talk.call(call_id, name, orjson.dumps(arguments).decode(), field)
        case kind:
            raise _unsupported(kind, field, "text, thinking and tool_use from an assistant")


def _unsupported(kind: str, field: str, taken: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field}: content blocks of type {kind[:64]!r} are not supported; this server takes {taken}",
        field=f"{field}.type",
    )
