"""The transport to a drafter in the verifier's process, which is called and not sent anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from foretoken.drafter import Drafter
from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.transports.transport import (
    DraftTransport,
    MalformedBatchError,
    TransportClosedError,
    TransportCounters,
    answer,
)

if TYPE_CHECKING:
    from foretoken.overlap_memory import OverlapMemory

# New tokens that may wait for ``begin_unawaited``. With more, the caller learns them itself. There
# is room for 50 prompts of 300 tokens that come at once.
MOST_UNAWAITED = 16_384


class InProcessTransport(DraftTransport):
    """It isolates nothing. ``post`` drafts on the caller's thread."""

    name = "in-process"

    def __init__(
        self,
        drafter: Drafter,
        counters: TransportCounters,
        overlap_memory: OverlapMemory | None = None,
        *,
        has_thread: bool = False,
    ) -> None:
        """
        Args:
            overlap_memory: device memory that the drafter also has.
            has_thread: whether the transport has a thread for unawaited requests. The drafter never
                runs on two threads at once.
        """
        super().__init__()
        self.overlap_memory = overlap_memory
        self._drafter = drafter
        self._counters = counters
        self._batch: DraftBatch | None = None
        self._thread = ThreadPoolExecutor(1, "in-process-drafter") if has_thread else None
        # Calls that are still to make, in order, and their new tokens; then those that the thread
        # has.
        self._unawaited: list[Callable[[], None]] = []
        self._num_tokens = 0
        self._given: Future[None] | None = None

    def is_open(self) -> bool:
        """Return whether the drafter has not raised."""
        return not self._closed

    def post(self, request: DraftRequest) -> None:
        """Draft at once.

        Raises TransportClosedError if the drafter raises, which ends its attachment.
        """
        with self._lock:
            self._finish()
            with self._ends_at_errors():
                self._draft(request)

    def post_unawaited(self, request: DraftRequest) -> None:
        """Leave the request to the thread. If that has an error, the next call raises it.

        Without a thread, draft at once.
        """
        self._leave(partial(self._draft, request), len(request.new_tokens))

    def begin_unawaited(self, least: int = 0) -> None:
        """Let the thread begin; wait first until it has done what it had.

        A caller that runs Python code then waits for the GIL, 0.2 to 0.4 ms in all. One that
        computes or sleeps loses nothing.
        """
        with self._lock:
            if not self._unawaited:
                return
            if self._thread is None or self._num_tokens < least:
                self._finish()
                return
            self._finish_given()
            self._given = self._thread.submit(_run_all, self._take_unawaited())

    def receive(self, timeout_s: float) -> DraftBatch | None:
        """Return the reply to the last request; None if it was malformed.

        ``timeout_s`` is not heeded: the reply is there, or is made now.
        """
        with self._lock:
            self._finish()
            batch, self._batch = self._batch, None
            return batch

    def is_idle(self) -> bool:
        with self._lock:
            return not self._unawaited and (self._given is None or self._given.done())

    def release(self, batch_slots: Sequence[int]) -> None:
        self._leave(partial(self._drafter.release, batch_slots), 0)

    def close(self) -> None:
        """Close, after what the thread was given."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._thread.shutdown()

    def _leave(self, call: Callable[[], None], num_tokens: int) -> None:
        """Leave a call, and the new tokens that it brings, to the thread, if there is one."""
        with self._lock:
            self._check_open()
            self._unawaited.append(call)
            self._num_tokens += num_tokens
            if self._thread is None or self._num_tokens > MOST_UNAWAITED:
                self._finish()

    def _draft(self, request: DraftRequest) -> None:
        self._batch = None
        try:
            batch = answer(self._drafter, request)
        except MalformedBatchError:
            self._counters.num_malformed += 1
            return
        if (batch.epoch, batch.step_id) != (request.epoch, request.step_id):
            self._counters.num_malformed += 1
            return
        self._batch = batch

    def _take_unawaited(self) -> list[Callable[[], None]]:
        taken, self._unawaited, self._num_tokens = self._unawaited, [], 0
        return taken

    def _finish_given(self) -> None:
        """Wait for the thread.

        Raises TransportClosedError if the drafter has raised, or the transport is closed.
        """
        given, self._given = self._given, None
        if given is not None:
            with self._ends_at_errors():
                given.result()
        self._check_open()

    def _finish(self) -> None:
        """Make all calls that are left. Raises as ``_finish_given``."""
        self._finish_given()
        with self._ends_at_errors():
            _run_all(self._take_unawaited())

    @contextlib.contextmanager
    def _ends_at_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._closed = True
            raise TransportClosedError(f"the drafter raised {error!r}") from error


def _run_all(work: Sequence[Callable[[], None]]) -> None:
    for each in work:
        each()
