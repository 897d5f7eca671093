"""What the service sends the engine: any thread puts, the engine takes at its next step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from verifier_svc.drafters.changes import AttachDrafter, DetachDrafter
from verifier_svc.messages import Abort, CloseSession, Submit

InboxMessage = Submit | Abort | CloseSession | AttachDrafter | DetachDrafter


class Inbox:
    """Messages in order, with a count of those that change how many sequences wait."""

    def __init__(self) -> None:
        self._messages: deque[InboxMessage] = deque()
        # Of the messages in here: sequences that want a place in the queue, and ends that may free one.
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
        """The oldest message; None if there is none."""
        with self._changed:
            if not self._messages:
                return None
            message = self._messages.popleft()
            self._count(message, -1)
            return message

    def room(self, queue_room: Callable[[], int]) -> int:
        """How many new sequences there is room for behind what is in here, as far as can be known."""
        with self._changed:
            return max(queue_room() - self._num_submits, self._num_ends, 0)

    def wake(self) -> None:
        """Let ``wait`` look again."""
        with self._changed:
            self._changed.notify()

    def wait(self, is_due: Callable[[], bool]) -> None:
        """Until there is a message, or ``is_due``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages) or is_due())

    def _count(self, message: InboxMessage, change: int) -> None:
        if isinstance(message, Submit):
            self._num_submits += change
        elif isinstance(message, Abort | CloseSession):
            self._num_ends += change
