"""Write the answer to POST /v1/messages, whole or as events."""

from __future__ import annotations

from typing import Any

import orjson

from foretoken.errors import ForetokenError
from foretoken.results import FinishReason
from gateway.anthropic.body import MessagesFields
from gateway.anthropic.content_blocks import ContentBlocks, message_event
from gateway.anthropic.errors import error_object
from gateway.chat.reply_tokens import ReplyTokens
from gateway.config import GatewaySettings
from gateway.figures import generation_metrics
from gateway.generation import Generation
from gateway.openai.chat_request import ChatRequest
from gateway.output import Delta
from gateway.reply_format import ReplyFormat

_PING = message_event("ping", {})


class MessagesFormat(ReplyFormat):
    """Writes Anthropic's message, or the events that build it."""

    keep_alive = _PING
    request_id_header = b"request-id"

    def __init__(self, chat: ChatRequest, fields: MessagesFields, settings: GatewaySettings) -> None:
        self._model = chat.model
        self._detail = settings.speculative_metrics
        self._tokens = ReplyTokens(chat.options.reply)
        hides_thinking = fields.thinking is not None and fields.thinking.display == "omitted"
        self._content = ContentBlocks(shows_thinking=not hides_thinking)

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        (delta,) = deltas
        self._add(delta)
        self._content.close()
        message = {
            **self._message(generation),
            **self._stop(generation),
            "usage": self._usage(generation),
        }
        return orjson.dumps({**message, **self._metrics(generation)})

    def first(self, generation: Generation) -> bytes:
        # What is cached, and so what counts as new input, is known at the end.
        usage = {**self._usage(generation), "output_tokens": 0}
        message = {**self._message(generation), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return message_event("message_start", {"message": message}) + _PING

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        return self._add(delta)

    def last(self, generation: Generation) -> bytes:
        end = {
            "delta": self._stop(generation),
            "usage": self._usage(generation),
            **self._metrics(generation),
        }
        return self._content.close() + message_event("message_delta", end) + message_event("message_stop", {})

    def failed(self, generation: Generation, error: ForetokenError) -> bytes:
        return message_event("error", error_object(error))

    def _add(self, delta: Delta) -> bytes:
        return b"".join([self._content.add(pieces) for pieces, _ in self._tokens.read(delta)])

    def _message(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": generation.request.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content.blocks,
            "seed": generation.request.sampling.seed,
        }

    def _stop(self, generation: Generation) -> dict[str, Any]:
        (output,) = generation.outputs
        if output.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._content.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(output.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.matched}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _metrics(self, generation: Generation) -> dict[str, Any]:
        if self._detail == "none":
            return {}
        return {"metrics": generation_metrics(generation, detailed=self._detail == "detailed")}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """Return the counts; Anthropic's ``input_tokens`` are those that no cache had."""
        return {
            "input_tokens": generation.prompt_tokens - generation.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._tokens.num_reasoning_tokens},
        }
