"""Write the answer to POST /v1/responses, whole or as events."""

from __future__ import annotations

import time
from typing import Any

import orjson

from foretoken.errors import ForetokenError, InvalidRequestError, QueueFullError
from foretoken.results import FinishReason, TokenLogprobs
from gateway.chat.reply_tokens import ReplyTokens
from gateway.config import GatewaySettings
from gateway.figures import generation_metrics
from gateway.generation import Generation
from gateway.http import error_object
from gateway.logprobs import chat_logprobs
from gateway.openai.chat_request import ChatRequest
from gateway.output import Delta
from gateway.reply_format import ReplyFormat
from gateway.responses.body import ResponsesFields
from gateway.responses.events import EventWriter
from gateway.responses.output_items import OutputItems
from gateway.tokenizer import Tokenizer


class ResponsesFormat(ReplyFormat):
    """Writes OpenAI's response object, or the events that build it."""

    def __init__(
        self, chat: ChatRequest, fields: ResponsesFields, settings: GatewaySettings, tokenizer: Tokenizer
    ) -> None:
        self._tokenizer = tokenizer
        self._detail = settings.speculative_metrics
        self._tokens = ReplyTokens(chat.options.reply)
        self._events = EventWriter()
        self._output = OutputItems(self._events)
        self._created_at = int(time.time())
        self._base = _echo(fields, chat)

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        (delta,) = deltas
        self._add(delta)
        self._close(generation)
        return orjson.dumps(self._ended(generation))

    def first(self, generation: Generation) -> bytes:
        response = self._response(generation, "in_progress")
        return self._events.write("response.created", {"response": response}) + self._events.write(
            "response.in_progress", {"response": response}
        )

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        return self._add(delta)

    def last(self, generation: Generation) -> bytes:
        events = self._close(generation)
        response = self._ended(generation)
        return events + self._events.write(f"response.{response['status']}", {"response": response})

    def failed(self, generation: Generation, error: ForetokenError) -> bytes:
        events = self._output.close("incomplete")
        details = {"code": _error_code(error), "message": error_object(error)["error"]["message"]}
        response = {**self._response(generation, "failed"), "error": details}
        return events + self._events.write("response.failed", {"response": response})

    def _add(self, delta: Delta) -> bytes:
        return b"".join(
            [
                self._output.add(pieces, self._shown(logprobs) if pieces.content else [])
                for pieces, logprobs in self._tokens.read(delta)
            ]
        )

    def _shown(self, logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, logprobs)["content"]
        return content

    def _close(self, generation: Generation) -> bytes:
        self._output.add_logprobs(self._shown(self._tokens.take_logprobs()))
        return self._output.close("incomplete" if _is_cut(generation) else "completed")

    def _ended(self, generation: Generation) -> dict[str, Any]:
        """Return the response after its output ended."""
        if _is_cut(generation):
            response = self._response(generation, "incomplete")
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response = {**self._response(generation, "completed"), "completed_at": int(time.time())}
        response["usage"] = _usage(generation, self._tokens.num_reasoning_tokens)
        if self._detail != "none":
            response["metrics"] = generation_metrics(generation, detailed=self._detail == "detailed")
        return response

    def _response(self, generation: Generation, status: str) -> dict[str, Any]:
        return {
            "id": generation.request.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output.items,
            "usage": None,
            "seed": generation.request.sampling.seed,
            **self._base,
        }


def _echo(fields: ResponsesFields, chat: ChatRequest) -> dict[str, Any]:
    """Return what a response repeats of its request, with the values that are in force."""
    sampling, text = chat.options.sampling, fields.text
    text_format = {"type": "text"} if text.format is None else text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "model": chat.model,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
        "background": False,
        "temperature": sampling.temperature,
        "text": {"format": text_format, "verbosity": text.verbosity or "medium"},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": fields.tools,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation,
        "user": fields.user,
    }


def _is_cut(generation: Generation) -> bool:
    return generation.outputs[0].finish_reason is FinishReason.LENGTH


def _usage(generation: Generation, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generation.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
    }


def _error_code(error: ForetokenError) -> str:
    """Return the nearest of the codes that a failed response may have."""
    if isinstance(error, InvalidRequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, QueueFullError) else "server_error"
