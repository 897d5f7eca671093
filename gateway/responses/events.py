"""Write the server-sent events of POST /v1/responses, numbered in order."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.reply_format import EVENT_END


class EventWriter:
    """Writes one response's events. Each has its type as its name, and a sequence number."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, kind: str, members: dict[str, Any]) -> bytes:
        """Return one event."""
        return self.head(kind, members) + self.end()

    def head(self, kind: str, members: dict[str, Any]) -> bytes:
        """Return an event up to further members, which begin with a comma, and ``end``."""
        return b"event: %b\ndata: %b" % (kind.encode(), orjson.dumps({"type": kind, **members})[:-1])

    def end(self) -> bytes:
        """Return the rest of an event after its own members."""
        number, self._number = self._number, self._number + 1
        return b',"sequence_number":%d}%b' % (number, EVENT_END)
