"""Queue messages from the service to the engine, which takes them at its next step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.messages import Abort, CloseSession, FlushCache, Submit

InboxMessage = Submit | Abort | CloseSession | AttachDrafter | DetachDrafter | FlushCache


class Inbox:
    """A first-in, first-out queue that counts the messages that change how many sequences wait."""

    def __init__(self) -> None:
        self._messages: deque[InboxMessage] = deque()
        # Queued submissions, which need queue room, and queued ends, which may free some.
        self._num_submits = 0
        self._num_ends = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: InboxMessage) -> None:
        with self._changed:
            self._messages.append(message)
            self._count(message, 1)
            self._changed.notify()

    def take(self) -> InboxMessage | None:
        """Remove and return the oldest message; None if there is none."""
        with self._changed:
            if not self._messages:
                return None
            message = self._messages.popleft()
            self._count(message, -1)
            return message

    def room(self, queue_room: Callable[[], int]) -> int:
        """Return an estimate of the new sequences that fit after the queued messages.

        ``queue_room``: returns how many more sequences the scheduler's queue takes now.
        """
        with self._changed:
            return max(queue_room() - self._num_submits, self._num_ends, 0)

    def wake(self) -> None:
        """Make ``wait`` check its condition again."""
        with self._changed:
            self._changed.notify()

    def wait(self, is_due: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until there is a message or ``is_due`` returns true.

        Return whether it is so in time.
        """
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._messages) or is_due(), timeout_s)

    def _count(self, message: InboxMessage, change: int) -> None:
        if isinstance(message, Submit):
            self._num_submits += change
        elif isinstance(message, Abort | CloseSession):
            self._num_ends += change
