"""Write the OpenAI endpoints' bodies and chunks from a generation's outputs and deltas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol

import orjson

from gateway.figures import generation_metrics
from gateway.generation import Delta, Generation, Output
from gateway.logprobs import CompletionLogprobs, chat_logprobs
from gateway.openai_request import GenerationOptions
from gateway.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
MetricsDetail = Literal["none", "summary", "detailed"]


class ReplyFormat(Protocol):
    """Writes the answer to one request in an API's shape."""

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        """Return the body, from one delta per output."""
        ...

    def first(self, generation: Generation) -> bytes:
        """Return the events before any delta; may be empty."""
        ...

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        """Return the events for one delta; empty if it shows nothing."""
        ...

    def last(self, generation: Generation) -> bytes:
        """Return the events after all deltas."""
        ...


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class OpenAiFormat(ABC):
    """Writes what chats and completions share: envelope, usage and metrics."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, options: GenerationOptions, model: str, created: int, tokenizer: Tokenizer, detail: MetricsDetail
    ):
        self._options = options
        self._model = model
        self._created = created
        self._tokenizer = tokenizer
        self._detail = detail

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        choices = [
            {
                **self._whole_choice(generation.outputs[delta.index], delta),
                **self._sources(delta),
                **self._end(generation.outputs[delta.index]),
            }
            for delta in deltas
        ]
        body = {**self._envelope(generation, self.whole_object), "choices": choices, "usage": _usage(generation)}
        return orjson.dumps(self._with_metrics(body, generation))

    def first(self, generation: Generation) -> bytes:
        return b""

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        output = generation.outputs[delta.index]
        shows_tokens = bool(delta.token_ids) and (self._options.return_token_sources or bool(delta.logprobs))
        if not (delta.text or delta.finished or delta.prompt_logprobs or shows_tokens):
            return b""
        choice = {**self._chunk_choice(output, delta), **self._sources(delta)}
        choice |= self._end(output) if delta.finished else {"finish_reason": None}
        body = {**self._envelope(generation, self.chunk_object), "choices": [choice]}
        if self._options.include_usage:
            body["usage"] = _usage(generation) if self._options.continuous_usage else None
        elif delta.finished:
            body = self._with_metrics(body, generation)
        return event(body)

    def last(self, generation: Generation) -> bytes:
        if not self._options.include_usage:
            return DONE
        body = {**self._envelope(generation, self.chunk_object), "choices": [], "usage": _usage(generation)}
        return event(self._with_metrics(body, generation)) + DONE

    @abstractmethod
    def _whole_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Return one choice of a whole response, without its end."""

    @abstractmethod
    def _chunk_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Return one choice of a streamed chunk, without its end."""

    def _envelope(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {"id": generation.request.id, "object": kind, "created": self._created, "model": self._model}

    def _sources(self, delta: Delta) -> dict[str, Any]:
        if not self._options.return_token_sources:
            return {}
        return {"token_ids": delta.token_ids, "token_sources": delta.sources, "token_texts": delta.token_texts}

    def _end(self, output: Output) -> dict[str, Any]:
        assert output.finish_reason is not None
        return {"finish_reason": output.finish_reason.value, "stop_reason": output.matched}

    def _with_metrics(self, body: dict[str, Any], generation: Generation) -> dict[str, Any]:
        """Return the body with its figures, which exist only for a single output."""
        if self._detail == "none" or len(generation.outputs) != 1:
            return body
        return {**body, "metrics": generation_metrics(generation, detailed=self._detail == "detailed")}


class ChatFormat(OpenAiFormat):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self, generation: Generation) -> bytes:
        return b"".join(
            event(
                {
                    **self._envelope(generation, self.chunk_object),
                    "choices": [
                        {
                            "index": output.index,
                            "delta": {"role": "assistant", "content": ""},
                            "logprobs": None,
                            "finish_reason": None,
                        }
                    ],
                    **({"usage": None} if self._options.include_usage else {}),
                }
            )
            for output in generation.outputs
        )

    def _whole_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        return {
            "index": output.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
        }

    def _chunk_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"index": output.index, "delta": content, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._options.sampling.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs)


class CompletionFormat(OpenAiFormat):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, options: GenerationOptions, model: str, created: int, tokenizer: Tokenizer, detail: MetricsDetail
    ):
        super().__init__(options, model, created, tokenizer, detail)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()

    def _whole_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        return self._chunk_choice(output, delta)

    def _chunk_choice(self, output: Output, delta: Delta) -> dict[str, Any]:
        return {
            "index": output.index,
            "text": self._text(output, delta),
            "logprobs": self._logprob_lists(output, delta),
        }

    def _text(self, output: Output, delta: Delta) -> str:
        if not self._options.echo or output.index in self._echoed:
            return delta.text
        self._echoed.add(output.index)
        assert output.prompt.text is not None
        return output.prompt.text + delta.text

    def _logprob_lists(self, output: Output, delta: Delta) -> dict[str, Any] | None:
        if self._options.sampling.logprobs is None:
            return None
        lists = self._logprobs.get(output.index)
        if lists is not None:
            return lists.take(delta.logprobs)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._options.skip_special_tokens)
        lists = self._logprobs[output.index] = CompletionLogprobs(self._tokenizer, detokenizer)
        prompt_ids = output.prompt.ids if self._options.echo else ()
        return lists.take(delta.logprobs, prompt_ids, delta.prompt_logprobs)


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    accepted, rejected = generation.prediction_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }
