"""Pass one session's events from the engine thread to the session's writer.

A slow reader queues no messages. The outbox merges its pending tokens, so the outputs of its
sequences bound the memory, and the engine never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from verifier_svc.messages import Event, SequenceKey, TokensEvent

# Most sequences with pending events: a session that does not read its results cannot submit more.
MAX_PENDING_SEQUENCES = 4096


class Outbox:
    """A buffer that the engine thread fills and one writer drains.

    It calls ``wake`` when it stops being empty.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._tokens: dict[SequenceKey, list[TokensEvent]] = {}
        self._last: dict[SequenceKey, Event] = {}

    def put(self, events: list[Event]) -> None:
        """Add one step's events. Each sequence's events are in order."""
        with self._lock:
            was_empty = not self._tokens and not self._last
            for event in events:
                if isinstance(event, TokensEvent):
                    self._tokens.setdefault(event.key, []).append(event)
                else:
                    self._last[event.key] = event
        if was_empty:
            self._wake()

    def take(self) -> list[Event]:
        """Return all events since the last call; a sequence's tokens come before its end."""
        with self._lock:
            tokens, last = self._tokens, self._last
            self._tokens, self._last = {}, {}
        merged = [events[0] if len(events) == 1 else _merge(events) for events in tokens.values()]
        return [*merged, *last.values()]

    @property
    def is_full(self) -> bool:
        """Return whether too many events are pending to accept another submission."""
        with self._lock:
            return len(self._last) + len(self._tokens) >= MAX_PENDING_SEQUENCES


def _merge(events: list[TokensEvent]) -> TokensEvent:
    """Merge consecutive events of one attempt into one."""
    first = events[0]
    return TokensEvent(
        first.key,
        first.attempt,
        first.offset,
        tuple(t for event in events for t in event.token_ids),
        tuple(s for event in events for s in event.sources),
        tuple(p for event in events for p in event.logprobs),
        first.prompt_logprobs,
        first.num_cached_tokens,
        next((event.tree for event in reversed(events) if event.tree is not None), None),
    )
