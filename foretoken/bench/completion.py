"""Record the raw response of a streamed completion, and read it afterwards.

While streams run, only bytes and arrival times are recorded. HTTP and JSON are parsed after all
streams have ended: a client often shares the machine's cores with the measured server.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.errors import ForetokenError

# Where chat models put text: the answer, and what servers call their thoughts.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class StreamError(ForetokenError):
    """The server refused a request, broke a stream, or sent something other than completions."""


class HttpStatusError(StreamError):
    """The server answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {error_text(body)}")
        self.status_code = status
        self.body = body


def error_text(body: bytes) -> str:
    """Return an error body's message in one line.

    OpenAI's and FastAPI's forms are known; other bodies are returned as text.
    """
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return " ".join((found if isinstance(found, str) else text).split())[:500]


@dataclass(slots=True)
class Recording:
    """One raw response. ``ends[i]`` bytes had arrived by ``times[i]`` (perf_counter seconds)."""

    sent_at: float
    raw: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def arrival(self, num_bytes: int) -> float:
        """Return when the first ``num_bytes`` bytes had arrived."""
        return self.times[bisect.bisect_left(self.ends, num_bytes)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event with text.

    ``num_tokens`` counts the output tokens up to and including it, or is None if unknown.
    """

    at: float
    text: str
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class StreamedCompletion:
    """One streamed completion. ``sent_at`` is in perf_counter seconds.

    ``token_ids`` is empty unless the request asked for it. ``speculation`` has the server's own
    figures, if it sends any.
    """

    sent_at: float
    chunks: tuple[Chunk, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    finish_reason: str
    speculation: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def first_at(self) -> float:
        return self.chunks[0].at

    @property
    def last_at(self) -> float:
        return self.chunks[-1].at


def read_completion(recording: Recording) -> StreamedCompletion:
    """Parse one recorded stream of /v1/completions or /v1/chat/completions.

    An output of tokens without text has one chunk, the one that ends it. Raises HttpStatusError for
    an error status, and StreamError if the stream is incomplete or has no usage: chunks do not say
    how many tokens there are.
    """
    status, pieces = take_apart(recording)
    if status != 200:
        raise HttpStatusError(status, b"".join(piece for piece, _ in pieces))
    chunks: list[Chunk] = []
    token_ids: list[int] = []
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] = {}
    finish_reason = ""
    done = False
    for payload, end in _events(pieces):
        if payload == b"[DONE]":
            done = True
            continue
        event = _parse(payload)
        if event.get("error"):
            raise StreamError(f"the stream broke: {event['error']}")
        usage = event.get("usage") or usage
        speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
        for choice in event.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            token_ids += choice.get("token_ids") or ()
            text = _text_of(choice)
            if text or (choice.get("finish_reason") and not chunks):
                so_far = (event.get("usage") or {}).get("completion_tokens")
                chunks.append(Chunk(recording.arrival(end), text, so_far))
    if not done or usage is None or not chunks:
        raise StreamError("the stream ended without text, usage or [DONE]")
    return StreamedCompletion(
        recording.sent_at,
        tuple(chunks),
        tuple(token_ids),
        int(usage.get("prompt_tokens") or 0),
        int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        finish_reason,
        speculation,
    )


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise StreamError(f"an event is no JSON object: {payload[:200]!r}")
    return event


def _text_of(choice: dict[str, Any]) -> str:
    """Return a choice's new text: what the model says, thinks, or gives to a tool."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    calls = ((call.get("function") or {}) for call in delta.get("tool_calls") or ())
    called = "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return "".join(delta.get(name) or "" for name in TEXT_FIELDS) + called


def take_apart(recording: Recording) -> tuple[int, list[tuple[bytes, int]]]:
    """Return the status and the body's pieces, each with its end in the raw response.

    Raises StreamError if it is no HTTP response.
    """
    raw = bytes(recording.raw)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.split(b"\r\n")
    parts = status_line.split()
    if not separator or len(parts) < 2 or not parts[1].isdigit():
        raise StreamError(f"no HTTP response: {raw[:200]!r}")
    headers = dict(line.lower().partition(b":")[::2] for line in lines)
    body_at = len(head) + len(separator)
    if headers.get(b"transfer-encoding", b"").strip() != b"chunked":
        # As it arrived: an event is there when its last byte is.
        ends = [body_at, *(end for end in recording.ends if end > body_at)]
        return int(parts[1]), [(raw[start:end], end) for start, end in itertools.pairwise(ends)]
    return int(parts[1]), _dechunk(raw, body_at)


def _dechunk(raw: bytes, at: int) -> list[tuple[bytes, int]]:
    """Return the chunks of the chunked body at ``at``. Raises StreamError if it is cut off."""
    pieces: list[tuple[bytes, int]] = []
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            raise StreamError("the response was cut off")
        try:
            size = int(raw[at:line_end].split(b";")[0], 16)
        except ValueError:
            raise StreamError(f"no chunked response: {raw[at:line_end][:50]!r}") from None
        if size == 0:
            return pieces
        start = line_end + 2
        if start + size > len(raw):
            raise StreamError("the response was cut off")
        pieces.append((raw[start : start + size], start + size))
        at = start + size + 2


def _events(pieces: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """Yield the data of each server-sent event, with the raw offset of the piece that completed it.

    Comments are left out.
    """
    events = []
    pending = b""
    for piece, end in pieces:
        pending = (pending + piece).replace(b"\r\n", b"\n")
        while b"\n\n" in pending:
            event, _, pending = pending.partition(b"\n\n")
            if event.startswith(b"data:"):
                events.append((event[5:].strip(), end))
    return events
