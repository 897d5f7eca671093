"""Stream one completion to the terminal and summarize its speculation: ``foretoken complete``.

It uses only the public REST API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from foretoken.commands.rest_address import key_headers, key_hint, no_answer, rest_url, tls_context
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.event_lines import event_lines

CONNECT_TIMEOUT_S = 5.0
# Between two chunks. The server's deadline for a request is shorter, and ends it with a message.
READ_TIMEOUT_S = 660.0
# The speed of a shorter output is not shown.
LEAST_TIMED_TOKENS = 16
_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# Replaces control characters except newline and tab: a model must not move the cursor or ring the
# bell.
_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@dataclass(frozen=True)
class CompletionOptions:
    """Options of the completion; None: the server's default."""

    prompt: str
    max_tokens: int = 128
    temperature: float | None = None
    seed: int | None = None
    speculation: bool = True
    drafter: str | None = None

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON body of the request."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_sources": True,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.seed is not None:
            body["seed"] = self.seed
        if not self.speculation:
            body["speculative"] = {"enabled": False}
        elif self.drafter is not None:
            body["speculative"] = {"drafter": self.drafter}
        return body


@dataclass
class _Summary:
    """Collects the figures of a stream, chunk by chunk."""

    num_tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    server_speed: float | None = None
    speculation: dict[str, Any] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any], now: float) -> None:
        if any(choice.get("text") for choice in chunk.get("choices", [])):
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
        self.num_tokens = (chunk.get("usage") or {}).get("completion_tokens", self.num_tokens)
        metrics = chunk.get("metrics") or {}
        self.server_speed = metrics.get("tokens_per_second", self.server_speed)
        self.speculation = metrics.get("speculative_decoding") or self.speculation

    def line(self) -> str:
        """Return the summary.

        Speed is the server's figure, or (tokens - 1) / (time of last chunk - time of first).
        """
        parts = [f"{self.num_tokens} tokens"]
        speed = self._speed()
        if speed is not None:
            parts.append(f"{speed:.1f} tok/s")
        drafted = self.speculation.get("num_draft_tokens", 0)
        accepted = self.speculation.get("num_accepted_draft_tokens", 0)
        if drafted:
            parts.append(f"{accepted} of {drafted} draft tokens accepted ({accepted / drafted:.0%})")
            parts.append(f"mean acceptance length {self.speculation.get('mean_acceptance_length', 1.0):.2f}")
        else:
            parts.append("nothing drafted")
        return ", ".join(parts)

    def _speed(self) -> float | None:
        # The tokens of a short text arrive together: their times do not show the server's speed.
        if self.num_tokens < LEAST_TIMED_TOKENS:
            return None
        # A terminal that takes text slowly makes the chunks look closer
        # together than they were sent.
        if self.server_speed is not None:
            return self.server_speed
        if self.first_at is None or self.last_at <= self.first_at:
            return None
        return (self.num_tokens - 1) / (self.last_at - self.first_at)


def complete(url: str, options: CompletionOptions, *, write: Callable[[str], None], colour: bool) -> str:
    """Stream one completion to ``write``; return the line of figures to show under it.

    With ``colour``, accepted draft tokens are green and control characters become visible; without
    it, the text stays unchanged. Raises UnavailableError if nothing answers, or a ForetokenError
    with the server's message.
    """
    summary = _Summary()
    url = rest_url(url)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    # Connect directly, whatever web proxy the machine uses.
    client = httpx.Client(
        base_url=url, timeout=timeout, trust_env=False, headers=key_headers(), verify=tls_context(url)
    )
    with client:
        try:
            body = options.body(_served_model(client))
            with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for chunk in _chunks(response):
                    summary.add(chunk, time.perf_counter())
                    for choice in chunk.get("choices", []):
                        write(render(choice, colour=colour))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if summary.first_at is not None and isinstance(error, httpx.TransportError):
                raise ForetokenError(f"{url}: the connection broke before the text was complete") from error
            raise no_answer(url, error) from error
    return summary.line()


def render(choice: dict[str, Any], *, colour: bool) -> str:
    """Return the text of one chunk's choice, with accepted draft tokens in green."""
    text: str = choice.get("text") or ""
    if not colour:
        return text
    sources: list[int] = choice.get("token_sources") or []
    texts: list[str] = choice.get("token_texts") or []
    joined = "".join(texts)
    if len(texts) == len(sources) and text.startswith(joined):
        painted = "".join(_paint(piece, source) for piece, source in zip(texts, sources, strict=True))
        # After the last token: bytes that never became a character, text held back for a stop
        # string.
        return painted + _paint(text[len(joined) :], 0)
    # Without the tokens' texts, only a chunk with a single source can be green.
    return _paint(text, 1 if sources and all(sources) else 0)


def _paint(text: str, source: int) -> str:
    shown = text.translate(_VISIBLE)
    return f"{_GREEN}{shown}{_RESET}" if source and shown else shown


def dim(text: str) -> str:
    return f"{_DIM}{text}{_RESET}"


def _served_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise _refusal(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(f"{client.base_url} answers, but is not an OpenAI-compatible server") from None


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event stream until [DONE].

    Raises the error of an error event.
    """
    for line in event_lines(response):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ForetokenError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk
    raise ForetokenError("the server ended the stream before it was complete")


def _refusal(response: httpx.Response) -> ForetokenError:
    """Return the error in a response other than 200: what the server says, and what to set."""
    try:
        error = response.json()["error"]
        message = str(error["message"])
        if response.status_code == 401:
            message += key_hint(is_set="authorization" in response.request.headers)
        return ForetokenError(message, field=str(error.get("param") or ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return ForetokenError(f"{response.url} answered with status {response.status_code}")
