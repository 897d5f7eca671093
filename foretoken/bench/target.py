"""A server under load: its address, its model's name, and how requests to it look."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from foretoken.bench.client import CHAT, COMPLETIONS, Address, get, post
from foretoken.bench.completion import StreamError
from foretoken.bench.prompts import CountTokens, LoadPrompt, MakeText, Message, text_by_count, text_by_rate, words_text
from foretoken.bench.stream import UserStream
from foretoken.errors import ConfigError, UnavailableError

Endpoint = Literal["completions", "chat"]
DEFAULT_OUTPUT_LEN = 128
# Words of the trial requests that show how many tokens a word is.
_FEW_WORDS, _MANY_WORDS = 32, 160


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests of a target have in common.

    Attributes:
        output_len: the most tokens of every output; None: as its prompt says.
        ignore_eos: whether the field is sent: outputs then have their full length.
        salted: whether each request has a ``cache_salt`` of its own.
    """

    endpoint: Endpoint
    output_len: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    salted: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """One server and the model that it is asked for. ``name`` is its column in reports."""

    name: str
    address: Address
    model: str
    options: RequestOptions

    def body(self, content: str | list[Message], output_len: int | None) -> dict[str, Any]:
        """Return the body of one request for at most ``output_len`` tokens (None: the default)."""
        options = self.options
        is_chat = options.endpoint == "chat"
        if is_chat and isinstance(content, str):
            content = [{"role": "user", "content": content}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if is_chat else "prompt": content,
            "max_tokens": options.output_len or output_len or DEFAULT_OUTPUT_LEN,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.salted:
            body["cache_salt"] = uuid.uuid4().hex
        return body | dict(options.extra)

    def stream(self, prompt: LoadPrompt, starts_after: float = 0.0) -> UserStream:
        """Return a user who sends one prompt. Raises ConfigError if it needs a chat."""
        if self.options.endpoint == "chat":
            bodies = tuple(self.body(list(turn), prompt.output_len) for turn in prompt.turns)
            return UserStream(bodies, starts_after, prompt.group, CHAT, is_conversation=len(bodies) > 1)
        if prompt.text is None:
            raise ConfigError("--dataset-path: some prompts are conversations: give --endpoint chat")
        return UserStream((self.body(prompt.text, prompt.output_len),), starts_after, prompt.group, COMPLETIONS)

    def trial(self, text: str) -> tuple[int, str, int]:
        """Send a request for one token without a stream.

        Return status, error text and its prompt's tokens.

        Raises StreamError if nothing answers.
        """
        body = self.body(text, None) | {"max_tokens": 1, "stream": False}
        del body["stream_options"]
        status, answer = post(self.address, CHAT if self.options.endpoint == "chat" else COMPLETIONS, body)
        if status != 200:
            return status, self.address.refusal(status, answer), 0
        try:
            return status, "", int(json.loads(answer)["usage"]["prompt_tokens"])
        except (ValueError, LookupError, TypeError):
            raise StreamError(f"{self.address}: the answer has no usage: {answer[:200]!r}") from None


def served_model(address: Address) -> str:
    """Return the first model that a server lists.

    Raises:
        UnavailableError: nothing answers, or no OpenAI-compatible server.
        StreamError: the server refuses.
    """
    try:
        status, body = get(address, "/v1/models", 30.0)
    except StreamError as error:
        raise UnavailableError(error.message) from None
    if status != 200:
        raise StreamError(f"{address}/v1/models: {address.refusal(status, body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(f"{address} answers, but is not an OpenAI-compatible server") from None


def takes_ignore_eos(target: BenchTarget) -> bool:
    """Return whether the server takes ``ignore_eos``.

    A server that knows it not may refuse the request.

    Raises:
        StreamError: the server refuses the request for another reason.
    """
    status, why, _ = target.trial(_trial_text(_FEW_WORDS))
    if status == 200:
        return True
    if "ignore_eos" in why:
        return False
    raise StreamError(f"{target.address}: {why}")


def text_maker(target: BenchTarget, count: CountTokens | None) -> MakeText:
    """Return a maker of texts with a given number of tokens.

    ``count`` makes it exact; without it, two trial requests are the measure.

    Raises:
        StreamError: the server does not answer the trial requests.
    """
    if count is not None:
        return text_by_count(count)
    found = []
    for num_words in (_FEW_WORDS, _MANY_WORDS):
        status, why, num_tokens = target.trial(_trial_text(num_words))
        if status != 200:
            raise StreamError(f"{target.address}: {why}")
        found.append(num_tokens)
    # What a chat template adds is in both.
    return text_by_rate((_MANY_WORDS - _FEW_WORDS) / max(found[1] - found[0], 1))


def _trial_text(num_words: int) -> str:
    return words_text(random.Random("trial"), num_words)
