"""Where events go: one outbox a session, which gets what a step emitted for it in one piece."""

from __future__ import annotations

import threading

from verifier_svc.messages import Event
from verifier_svc.outbox import Outbox


class Sessions:
    """Opened by any thread; the engine thread does the rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._last_id = 0
        # Emitted and not handed out, by session.
        self._pending: dict[int, list[Event]] = {}

    def open(self, outbox: Outbox) -> int:
        """Register where a session's events go; returns its id."""
        with self._lock:
            self._last_id += 1
            self._outboxes[self._last_id] = outbox
            return self._last_id

    def close(self, session_id: int) -> None:
        """Forget a session and what nobody will read any more."""
        self._pending.pop(session_id, None)
        with self._lock:
            self._outboxes.pop(session_id, None)

    def emit(self, event: Event) -> None:
        """Keep an event for ``publish``."""
        self._pending.setdefault(event.key.session_id, []).append(event)

    def publish(self) -> None:
        """Hand each session what was emitted for it since the last call."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        for session_id, events in pending.items():
            outbox = self._outboxes.get(session_id)
            if outbox is not None:
                outbox.put(events)
