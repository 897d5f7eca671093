"""Turns wire data into an Answer: a reader for each API also notes broken rules of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from protos import common_pb2, gateway_pb2
from tests.chaos.answer import Answer, Choice

# prompt_tokens_details depends on the prefix cache, which is not part of the answer.
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class ErrorEventError(Exception):
    """The server ended a stream with an error event."""


class Reader(Protocol):
    """Takes one answer's JSON objects in order. ``feed`` returns the choices with something new."""

    answer: Answer

    def feed(self, event: Any) -> list[int]: ...


class EventStream:
    """Reads server-sent events. Comments may stand anywhere; [DONE] comes last and once."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        """Read more bytes; return the choices that got something new. Raises ErrorEventError."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        changed: list[int] = []
        for block in blocks:
            lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
            if lines:
                changed += self._event(lines)
        return changed

    def end(self) -> None:
        """Note that the connection ended in order."""
        if self._rest.strip():
            self._complain(f"the stream ended within an event: {self._rest[:80]!r}")

    def _event(self, lines: Sequence[bytes]) -> list[int]:
        answer = self.reader.answer
        if len(lines) != 1 or not lines[0].startswith(b"data: "):
            self._complain(f"no event of one data line: {lines[:3]!r}")
            return []
        data = lines[0].removeprefix(b"data: ")
        if answer.ended:
            self._complain(f"an event after [DONE]: {data[:80]!r}")
        if data == b"[DONE]":
            answer.ended = True
            return []
        event = orjson.loads(data)
        if "error" in event:
            raise ErrorEventError(str(event["error"]))
        return self.reader.feed(event)

    def _complain(self, violation: str) -> None:
        self.reader.answer.violations.append(violation)


class OpenAiReader:
    """Reads chunks and whole bodies of /v1/completions and /v1/chat/completions."""

    def __init__(self, *, chat: bool) -> None:
        self.answer = Answer()
        self._chat = chat
        self._roles: set[int] = set()

    def feed(self, event: Any) -> list[int]:
        if event.get("usage"):
            self._read_usage({name: event["usage"][name] for name in USAGE})
        return [item["index"] for item in event["choices"] if self._read_choice(item)]

    def _read_usage(self, usage: dict[str, int]) -> None:
        before = self.answer.usage
        if usage["completion_tokens"] < before.get("completion_tokens", 0):
            self.answer.violations.append(f"usage went back from {before} to {usage}")
        self.answer.usage = usage

    def _read_choice(self, item: dict[str, Any]) -> bool:
        """Read one choice; return whether it brought text or tokens."""
        index, choice = item["index"], self.answer.choice(item["index"])
        text, logprobs = self._chat_parts(item) if self._chat else (item["text"], _columns(item["logprobs"]))
        token_ids = item.get("token_ids", [])
        if choice.num_finishes and (text or token_ids or item["finish_reason"] is None):
            self.answer.violations.append(f"choice {index} goes on after its end")
        if len(item.get("token_sources", [])) != len(token_ids):
            self.answer.violations.append(f"choice {index}: not one source a token")
        choice.text += text
        choice.token_ids += token_ids
        choice.token_texts += item.get("token_texts", [])
        choice.logprobs += logprobs
        if item["finish_reason"] is not None:
            _finish(choice, item["finish_reason"], item["stop_reason"])
        return bool(text or token_ids)

    def _chat_parts(self, item: dict[str, Any]) -> tuple[str, list[Any]]:
        message = item["message"] if "message" in item else item["delta"]
        if "role" in message:
            if item["index"] in self._roles:
                self.answer.violations.append(f"choice {item['index']} begins twice")
            self._roles.add(item["index"])
        return message.get("content") or "", (item["logprobs"] or {}).get("content", [])


class GenerateReader:
    """Reads objects of /generate: cumulative if streamed, a list if several were requested."""

    def __init__(self) -> None:
        self.answer = Answer()

    def feed(self, event: Any) -> list[int]:
        items = event if isinstance(event, list) else [event]
        return [
            index
            for index, item in ((item.get("index", place), item) for place, item in enumerate(items))
            if self._read_item(index, item)
        ]

    def _read_item(self, index: int, item: dict[str, Any]) -> bool:
        choice, meta = self.answer.choice(index), item["meta_info"]
        lists = meta.get("output_token_logprobs", []), meta.get("output_top_logprobs", [])
        logprobs = [list(pair) for pair in zip(*lists, strict=True)]
        begun = (choice.text, choice.token_ids, choice.logprobs)
        for name, before, now in zip(
            ("text", "output_ids", "logprobs"), begun, (item["text"], item["output_ids"], logprobs), strict=True
        ):
            if now[: len(before)] != before:
                self.answer.violations.append(f"choice {index}: {name} is no longer what it was")
        if choice.num_finishes:
            self.answer.violations.append(f"choice {index} goes on after its end")
        if meta["completion_tokens"] != len(item["output_ids"]):
            self.answer.violations.append(f"choice {index}: completion_tokens {meta['completion_tokens']} of its ids")
        grew = len(item["output_ids"]) > len(choice.token_ids) or len(item["text"]) > len(choice.text)
        choice.text, choice.token_ids, choice.logprobs = item["text"], item["output_ids"], logprobs
        inputs = meta.get("input_token_logprobs", []), meta.get("input_top_logprobs", [])
        choice.prompt_logprobs = [list(pair) for pair in zip(*inputs, strict=True)]
        choice.num_prompt_tokens, choice.num_output_tokens = meta["prompt_tokens"], meta["completion_tokens"]
        if meta["finish_reason"] is not None:
            _finish(choice, meta["finish_reason"]["type"], meta["finish_reason"].get("matched"))
        return grew


class GrpcReader:
    """Reads messages of GatewayService.Generate, whose offsets must have no gap or overlap."""

    def __init__(self, request: gateway_pb2.GenerateRequest) -> None:
        self.answer = Answer()
        self._request = request

    def feed(self, message: gateway_pb2.GenerateResponse) -> list[int]:
        if message.HasField("complete"):
            self._complete(message.complete)
            return []
        return [message.chunk.choice_index] if self._chunk(message.chunk) else []

    def _chunk(self, chunk: gateway_pb2.Chunk) -> bool:
        choice, where = self.answer.choice(chunk.choice_index), f"choice {chunk.choice_index}"
        violations = self.answer.violations
        if choice.num_finishes:
            violations.append(f"{where} goes on after its end")
        if chunk.offset != len(choice.token_ids):
            violations.append(f"{where}: offset {chunk.offset} after {len(choice.token_ids)} tokens")
        if chunk.num_output_tokens != chunk.offset + len(chunk.token_ids):
            violations.append(f"{where}: num_output_tokens {chunk.num_output_tokens} at offset {chunk.offset}")
        if len(chunk.sources) != len(chunk.token_ids):
            violations.append(f"{where}: not one source a token")
        if self._request.sampling.HasField("logprobs") and len(chunk.logprobs) != len(chunk.token_ids):
            violations.append(f"{where}: not one logprob a token")
        choice.text += chunk.text
        choice.token_ids += chunk.token_ids
        choice.logprobs += [_entry(entry) for entry in chunk.logprobs]
        choice.prompt_logprobs += [_entry(entry) for entry in chunk.prompt_logprobs]
        return bool(chunk.text or chunk.token_ids)

    def _complete(self, complete: gateway_pb2.Complete) -> None:
        choice = self.answer.choice(complete.choice_index)
        _finish(choice, common_pb2.FinishReason.Name(complete.reason), complete.stop or None)
        choice.num_prompt_tokens, choice.num_output_tokens = complete.num_prompt_tokens, complete.num_output_tokens
        if (complete.seed, complete.request_id) != (self._request.sampling.seed, self._request.request_id):
            self.answer.violations.append(f"seed {complete.seed} or id {complete.request_id!r} is not the request's")


def _finish(choice: Choice, reason: str, matched: str | int | None) -> None:
    choice.num_finishes += 1
    choice.finish_reason, choice.stop_reason = reason, matched


def _columns(logprobs: dict[str, list[Any]] | None) -> list[Any]:
    """Return OpenAI's columns as one entry a token."""
    if logprobs is None:
        return []
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(entry) for entry in zip(*(logprobs[name] for name in names), strict=True)]


def _entry(entry: common_pb2.TokenLogprobs) -> list[Any]:
    return [entry.token_id, entry.logprob, entry.rank, list(entry.top_ids), list(entry.top_logprobs)]
