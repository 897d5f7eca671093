"""Write the OpenAI endpoints' bodies and chunks from a generation's outputs and deltas."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import orjson

from foretoken.results import FinishReason, VerifiedTree
from gateway.chat.call_parser import Constraint
from gateway.chat.pieces import ReplyPieces, ToolCallDelta, whole_calls
from gateway.chat.reply_reader import ReplyReader
from gateway.figures import generation_metrics
from gateway.generation import Generation
from gateway.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from gateway.openai.request import GenerationOptions
from gateway.output import Delta, Output
from gateway.reply_format import DONE, EVENT, EVENT_END, ReplyFormat, event
from gateway.tokenizer import Tokenizer

MetricsDetail = Literal["none", "summary", "detailed"]


class OpenAiFormat(ReplyFormat):
    """Writes what chats and completions share: envelope, usage and metrics.

    A chunk is put together from bytes, because a busy server writes tens of thousands a second:
    what all chunks of an output share is encoded once.
    """

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
        self._shows_ids = options.return_token_sources or options.return_token_ids or options.return_draft_tree
        # By output: a chunk up to its text.
        self._chunk_heads: dict[int, bytes] = {}

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        has_seeds = len(generation.request.prompts) > 1
        choices = [
            {
                "index": delta.index,
                **self._whole_text(generation.outputs[delta.index], delta),
                "logprobs": self._logprobs(generation.outputs[delta.index], delta),
                **self._sources(delta),
                **self._end(generation.outputs[delta.index]),
                **self._choice_prompt(generation.outputs[delta.index], delta),
                **({"seed": generation.outputs[delta.index].spec.sampling.seed} if has_seeds else {}),
            }
            for delta in deltas
        ]
        body = {
            **self._envelope(generation, self.whole_object),
            "choices": choices,
            "usage": _usage(generation, self._options),
            "seed": generation.request.sampling.seed,
            **self._body_prompt(generation, deltas),
        }
        return orjson.dumps(self._with_metrics(body, generation))

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        output = generation.outputs[delta.index]
        shows_tokens = bool(delta.token_ids) and (self._shows_ids or bool(delta.logprobs))
        if not (self._has_progress(delta) or delta.finished or delta.prompt_logprobs or shows_tokens):
            return b""
        logprobs = self._logprobs(output, delta)
        parts = [
            self._chunk_heads.get(delta.index) or self._chunk_head(generation, delta.index),
            self._chunk_text(output, delta),
            b',"logprobs":null' if logprobs is None else b"," + _members({"logprobs": logprobs}),
        ]
        if self._shows_ids:
            parts += (b",", _members(self._sources(delta) | self._first_prompt(output)))
        parts += (b",", _members(self._end(output))) if delta.finished else (b',"finish_reason":null',)
        parts.append(b"}]")
        if delta.finished:
            parts.append(b',"seed":%d' % output.spec.sampling.seed)
        if self._options.include_usage:
            parts += (b",", _members(self._chunk_usage(generation)))
        elif delta.finished and (metrics := self._with_metrics({}, generation)):
            parts += (b",", _members(metrics))
        parts += (b"}", EVENT_END)
        return b"".join(parts)

    def last(self, generation: Generation) -> bytes:
        if not self._options.include_usage:
            return DONE
        body = {
            **self._envelope(generation, self.chunk_object),
            "choices": [],
            "usage": _usage(generation, self._options),
        }
        return event(self._with_metrics(body, generation)) + DONE

    def _chunk_usage(self, generation: Generation) -> dict[str, Any]:
        """Return what a chunk says of usage, if the client wants any."""
        if not self._options.include_usage:
            return {}
        return {"usage": _usage(generation, self._options) if self._options.continuous_usage else None}

    def _has_progress(self, delta: Delta) -> bool:
        """Return whether a delta has text to show, or tokens whose text waits for more tokens.

        As in vLLM, a chunk without text then shows that the stream goes on.
        """
        return bool(delta.token_ids or delta.text)

    @abstractmethod
    def _whole_text(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Return the members of a whole response's choice that hold its text."""

    @abstractmethod
    def _chunk_text(self, output: Output, delta: Delta) -> bytes:
        """Return the members of a streamed choice that hold its text, in JSON."""

    @abstractmethod
    def _logprobs(self, output: Output, delta: Delta) -> dict[str, Any] | None:
        """Return a choice's logprobs; None if the client wants none."""

    def _chunk_head(self, generation: Generation, index: int) -> bytes:
        envelope = _members(self._envelope(generation, self.chunk_object))
        head = self._chunk_heads[index] = b'%b{%b,"choices":[{"index":%d,' % (EVENT, envelope, index)
        return head

    def _envelope(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {"id": generation.request.id, "object": kind, "created": self._created, "model": self._model}

    def _choice_prompt(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Return what a whole response's choice says of its prompt."""
        return {}

    def _body_prompt(self, generation: Generation, deltas: list[Delta]) -> dict[str, Any]:
        """Return what a whole response says of its only prompt."""
        return {}

    def _first_prompt(self, output: Output) -> dict[str, Any]:
        """Return what an output's first chunk says of its prompt."""
        return {}

    def _prompt(self, output: Output, delta: Delta) -> dict[str, Any]:
        """Return vLLM's members for a prompt, as far as the client wants them."""
        found: dict[str, Any] = {}
        if (top_k := self._options.prompt_logprobs) is not None:
            found["prompt_logprobs"] = prompt_logprobs(self._tokenizer, delta.prompt_logprobs, top_k)
        if self._options.return_token_ids:
            found["prompt_token_ids"] = output.prompt.ids
        return found

    def _sources(self, delta: Delta) -> dict[str, Any]:
        options = self._options
        found: dict[str, Any] = {}
        if options.return_token_sources or options.return_token_ids:
            found["token_ids"] = delta.token_ids
        if options.return_token_sources:
            found |= {
                "token_sources": delta.sources,
                "token_drafters": delta.drafters,
                "token_texts": delta.token_texts,
            }
            if options.prediction:
                found["token_predicted"] = delta.predicted
        if options.return_draft_tree:
            found["draft_tree"] = None if delta.tree is None else self._tree(delta.tree, delta.tree_drafters)
        return found

    def _tree(self, tree: VerifiedTree, drafters: list[str | None]) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(token_id)[0] for token_id in tree.token_ids]
        return {**tree._asdict(), "drafters": drafters, "token_texts": texts}

    def _end(self, output: Output) -> dict[str, Any]:
        assert output.finish_reason is not None
        return {"finish_reason": output.finish_reason.value, "stop_reason": output.matched}

    def _with_metrics(self, body: dict[str, Any], generation: Generation) -> dict[str, Any]:
        """Return the body with its figures, which exist only for a single output."""
        if self._detail == "none" or len(generation.outputs) != 1:
            return body
        return {**body, "metrics": generation_metrics(generation, detailed=self._detail == "detailed")}


class ChatFormat(OpenAiFormat):
    """Answers of ``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, options: GenerationOptions, model: str, created: int, tokenizer: Tokenizer, detail: MetricsDetail
    ):
        super().__init__(options, model, created, tokenizer, detail)
        # Then all text is content, and no reader is needed.
        self._is_plain = options.reply.is_plain
        self._readers: dict[int, ReplyReader] = {}
        # Of the chunk that is being written.
        self._pieces = ReplyPieces()

    def _body_prompt(self, generation: Generation, deltas: list[Delta]) -> dict[str, Any]:
        return self._prompt(generation.outputs[0], deltas[0])

    def first(self, generation: Generation) -> bytes:
        prompt_ids = generation.outputs[0].prompt.ids
        return b"".join(
            event(
                {
                    **self._envelope(generation, self.chunk_object),
                    **({"prompt_token_ids": prompt_ids} if self._options.return_token_ids and not output.index else {}),
                    "choices": [
                        {
                            "index": output.index,
                            "delta": {"role": "assistant", "content": ""},
                            "logprobs": None,
                            "finish_reason": None,
                        }
                    ],
                    **self._chunk_usage(generation),
                }
            )
            for output in generation.outputs
        )

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        if not self._is_plain:
            self._pieces = self._reader(delta.index).feed(delta.text, finished=delta.finished)
        return super().chunk(generation, delta)

    def _reader(self, index: int) -> ReplyReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._options.reply.reader()
        return reader

    def _has_progress(self, delta: Delta) -> bool:
        return super()._has_progress(delta) if self._is_plain else bool(self._pieces)

    def _end(self, output: Output) -> dict[str, Any]:
        end = super()._end(output)
        if output.finish_reason is FinishReason.STOP and not self._is_plain and self._reader(output.index).has_calls:
            end["finish_reason"] = "tool_calls"
        return end

    def _whole_text(self, output: Output, delta: Delta) -> dict[str, Any]:
        if self._is_plain:
            return {"message": {"role": "assistant", "content": delta.text, "refusal": None}}
        pieces = self._reader(output.index).feed(delta.text, finished=True)
        calls = whole_calls(pieces.tool_calls)
        # A call that is cut before its name is known is left out.
        must_call = self._options.reply.constraint is Constraint.REPLY
        content = pieces.content or (None if calls or must_call else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if pieces.reasoning:
            message["reasoning_content"] = pieces.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return {"message": message}

    def _chunk_text(self, output: Output, delta: Delta) -> bytes:
        if not self._is_plain:
            return _members({"delta": _pieces_delta(self._pieces)})
        has_content = bool(delta.text) or not delta.finished
        return b'"delta":{"content":%b}' % orjson.dumps(delta.text) if has_content else b'"delta":{}'

    def _logprobs(self, output: Output, delta: Delta) -> dict[str, Any] | None:
        if self._options.sampling.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs)


class CompletionFormat(OpenAiFormat):
    """Answers of ``/v1/completions``."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, options: GenerationOptions, model: str, created: int, tokenizer: Tokenizer, detail: MetricsDetail
    ):
        super().__init__(options, model, created, tokenizer, detail)
        self._columns: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        # Outputs whose prompt's ids have been sent.
        self._named_prompts: set[int] = set()

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        return super().whole(generation, [self._shown(delta) for delta in deltas])

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        return super().chunk(generation, self._shown(delta))

    def _shown(self, delta: Delta) -> Delta:
        """Return what the client sees of a delta."""
        if not self._options.shows_prompt_alone:
            return delta
        return Delta(delta.index, prompt_logprobs=delta.prompt_logprobs, finished=delta.finished)

    def _whole_text(self, output: Output, delta: Delta) -> dict[str, Any]:
        return {"text": self._text(output, delta)}

    def _chunk_text(self, output: Output, delta: Delta) -> bytes:
        return b'"text":%b' % orjson.dumps(self._text(output, delta))

    def _choice_prompt(self, output: Output, delta: Delta) -> dict[str, Any]:
        return self._prompt(output, delta)

    def _first_prompt(self, output: Output) -> dict[str, Any]:
        if not self._options.return_token_ids or output.index in self._named_prompts:
            return {}
        self._named_prompts.add(output.index)
        return {"prompt_token_ids": output.prompt.ids}

    def _text(self, output: Output, delta: Delta) -> str:
        if not self._options.echo or output.index in self._echoed:
            return delta.text
        self._echoed.add(output.index)
        assert output.prompt.text is not None
        return output.prompt.text + delta.text

    def _logprobs(self, output: Output, delta: Delta) -> dict[str, Any] | None:
        if self._options.sampling.logprobs is None:
            return None
        columns = self._columns.get(output.index)
        if columns is not None:
            return columns.take(delta.logprobs)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._options.skip_special_tokens)
        columns = self._columns[output.index] = CompletionLogprobs(self._tokenizer, detokenizer)
        if not self._options.echo:
            return columns.take(delta.logprobs)
        # More best tokens may have been computed for prompt_logprobs.
        top_k = self._options.sampling.logprobs
        entries = [entry._replace(top=entry.top[:top_k]) for entry in delta.prompt_logprobs]
        return columns.take(delta.logprobs, output.prompt.ids, entries)


def _pieces_delta(pieces: ReplyPieces) -> dict[str, Any]:
    """Return the delta of a chat's chunk."""
    delta: dict[str, Any] = {}
    if pieces.reasoning:
        delta["reasoning_content"] = pieces.reasoning
    if pieces.content:
        delta["content"] = pieces.content
    if pieces.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in pieces.tool_calls]
    return delta


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _members(value: dict[str, Any]) -> bytes:
    """Return a JSON object's members without its braces."""
    return orjson.dumps(value)[1:-1]


def _usage(generation: Generation, options: GenerationOptions) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    if options.shows_prompt_alone:
        completion = 0
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
