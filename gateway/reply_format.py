"""What each API's writer of answers does, and the frame of server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from foretoken.errors import ForetokenError
from gateway.generation import Generation
from gateway.http import error_object
from gateway.output import Delta

EVENT, EVENT_END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
# Characters at which some clients end a line, though events end theirs with newlines
# alone: U+0085, U+2028, U+2029.
_OTHER_LINE_ENDS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


class ReplyFormat(ABC):
    """Writes the answer to one request in an API's shape."""

    # Sent while a generation waits for a verifier: it keeps connections
    # open, and clients ignore it.
    keep_alive: bytes = b": waiting for a verifier\n\n"

    # The header with the client's name for the request, or else ours.
    request_id_header: bytes = b"x-request-id"

    @abstractmethod
    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        """Return the body, from one delta per output."""

    def first(self, generation: Generation) -> bytes:
        """Return the events before any delta; may be empty."""
        return b""

    @abstractmethod
    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        """Return the events for one delta; empty if it shows nothing."""

    def last(self, generation: Generation) -> bytes:
        """Return the events after all deltas."""
        return DONE

    def failed(self, generation: Generation, error: ForetokenError) -> bytes:
        """Return the events that end a stream after an error."""
        return event(error_object(error)) + DONE


def for_any_reader(events: bytes) -> bytes:
    """Return events with certain characters of their JSON escaped.

    Some clients take these for the end of a line.
    """
    for character, escaped in _OTHER_LINE_ENDS.items():
        events = events.replace(character, escaped)
    return events


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return EVENT + orjson.dumps(value) + EVENT_END
