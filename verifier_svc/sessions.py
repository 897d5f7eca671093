"""Deliver events to sessions: each session has one outbox, which gets a step's events at once."""

from __future__ import annotations

import threading
from collections import defaultdict

from verifier_svc.messages import Event
from verifier_svc.outbox import Outbox


class Sessions:
    """The outboxes of all open sessions. Only ``open`` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._last_id = 0
        # Events that were emitted and not yet published, by session.
        self._pending: defaultdict[int, list[Event]] = defaultdict(list)

    def open(self, outbox: Outbox) -> int:
        """Register a session's outbox and return the session's id."""
        with self._lock:
            self._last_id += 1
            self._outboxes[self._last_id] = outbox
            return self._last_id

    def close(self, session_id: int) -> None:
        """Forget a session and its unpublished events."""
        self._pending.pop(session_id, None)
        with self._lock:
            self._outboxes.pop(session_id, None)

    def emit(self, event: Event) -> None:
        """Keep an event for ``publish``."""
        self._pending[event.key.session_id].append(event)

    def publish(self) -> None:
        """Put the events since the last call into their sessions' outboxes."""
        if not self._pending:
            return
        pending, self._pending = self._pending, defaultdict(list)
        for session_id, events in pending.items():
            outbox = self._outboxes.get(session_id)
            if outbox is not None:
                outbox.put(events)
