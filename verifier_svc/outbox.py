"""Events of one session on their way from the engine thread to the session's writer.

A reader that is behind does not queue messages: what it has not taken is merged, tokens to tokens, so memory is
bounded by the outputs of the sequences that it submitted, and the engine never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from verifier_svc.messages import Event, SequenceKey, TokensEvent

# Sequences with untaken events; a session that reads none of its results may not submit more than this.
MAX_PENDING_SEQUENCES = 4096


class Outbox:
    """Filled by the engine thread, drained by one writer. ``wake`` is called when it stops being empty."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._tokens: dict[SequenceKey, list[TokensEvent]] = {}
        self._last: dict[SequenceKey, Event] = {}

    def put(self, events: list[Event]) -> None:
        """Add one step's events, each sequence's in order."""
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
        """All events since the last call; a sequence's tokens come before its end."""
        with self._lock:
            tokens, last = self._tokens, self._last
            self._tokens, self._last = {}, {}
        return [*(_merge(events) for events in tokens.values()), *last.values()]

    @property
    def is_full(self) -> bool:
        """Whether so much lies untaken that new submissions must be refused."""
        with self._lock:
            return len(self._last) + len(self._tokens) >= MAX_PENDING_SEQUENCES

    def num_pending_tokens(self) -> int:
        """Tokens that lie untaken."""
        with self._lock:
            return sum(len(event.token_ids) for events in self._tokens.values() for event in events)


def _merge(events: list[TokensEvent]) -> TokensEvent:
    """Consecutive events of one attempt as one."""
    if len(events) == 1:
        return events[0]
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
    )
