"""What all transports between a verifier and a drafter share: the protocol, the order of requests, the checks.

A transport moves ``DraftRequest``s one way and ``DraftBatch``es the other, in order, one reply a request. It knows
neither policies nor models. There are three: the arena (arena.py), the gRPC stream
(verifier_svc/drafters/stream.py) and the one below, for a drafter in the same process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foretoken.drafter import Drafter
from foretoken.drafting import RAGGED_COLUMNS, ROW_DTYPE, DraftBatch, DraftRequest
from foretoken.transports.draft_parts import split_request
from foretoken.tree import Int32

if TYPE_CHECKING:
    from foretoken.resident import ResidentMemory, StreamOrder

# New tokens of one request on the wire. A batch with more is split; the tokens of four long prompts fit in a few.
DEFAULT_TOKEN_CAPACITY = 8192
# Bytes of hidden rows of one request at most; more are split. It bounds the memory of an arena's buffer.
MAX_HIDDEN_BYTES = 16 << 20
# A request has a row for each running sequence, and for each that ended since the last one.
ROWS_PER_SLOT = 2
# Requests that a drafter may be behind. The next ones wait on the verifier's side.
WINDOW = 4
# Requests that may wait there before new ones are dropped: a drafter that is this far behind is as good as gone.
MAX_WAITING = 1024


class TransportClosedError(Exception):
    """The other side is gone, or what it sent ended the attachment. The transport is of no more use."""


def token_capacity_for(
    max_rows: int, hidden_width: int, most: int = DEFAULT_TOKEN_CAPACITY, hidden_bytes: int = MAX_HIDDEN_BYTES
) -> int:
    """New tokens that one request may carry, each with a hidden row of so many float32 values."""
    if hidden_width:
        most = min(most, hidden_bytes // (4 * hidden_width))
    return max(most, max_rows)


class MalformedBatchError(ValueError):
    """A reply that may not be sliced: its counts contradict each other or the request."""


class DraftTransport(Protocol):
    """The verifier's end, used by the engine thread. ``close`` may come from any thread."""

    @property
    def name(self) -> str:
        """shared-memory, grpc or in-process."""
        ...

    @property
    def resident(self) -> ResidentMemory | None:
        """Device memory that the drafter has too; None: there is none, and no request may be of a resident step.

        Both this and ``order`` may be used on after ``close``, by work that is still queued: they go with their last
        user.
        """
        ...

    @property
    def order(self) -> StreamOrder:
        """Between the verifier's work on that memory and the drafter's."""
        ...

    def is_open(self) -> bool:
        """Whether the drafter is there, as far as its transport tells; it may stand still. Costs microseconds."""
        ...

    def post(self, request: DraftRequest) -> None:
        """Send a request without waiting. Raises TransportClosedError if the drafter is gone."""
        ...

    def receive(self, timeout_s: float) -> DraftBatch | None:
        """The reply to the request posted last, checked by ``check_batch``; older replies are dropped.

        None if it did not come in time, or was dropped as malformed: then the request counts as unanswered, and a
        late reply is dropped when it comes. Raises TransportClosedError as soon as the drafter is gone.
        """
        ...

    def is_idle(self) -> bool:
        """Whether the drafter has answered all that was sent. Replies that have come and nobody awaits are dropped.

        Raises TransportClosedError if the drafter is gone.
        """
        ...

    def release(self, slots: Sequence[int]) -> None:
        """Tell the drafter to forget slots, before it sees any later request. Does not wait."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


@dataclass(slots=True)
class TransportCounters:
    """What passed through the transports of one drafter. Written by the engine thread."""

    num_posted: int = 0
    num_received: int = 0
    # Requests whose reply had not come in time, replies that were malformed or wrongly stamped, and requests that
    # were never sent because the drafter was too far behind.
    num_late: int = 0
    num_malformed: int = 0
    num_dropped: int = 0

    @property
    def num_rejected(self) -> int:
        return self.num_late + self.num_malformed + self.num_dropped


def check_request(request: DraftRequest, max_rows: int) -> None:
    """Raise ValueError unless the offsets of all ragged columns may be sliced with."""
    rows = request.num_rows
    if rows > max_rows:
        raise ValueError(f"a draft request has {rows} rows; at most {max_rows} were agreed at attach")
    starts, totals = request.starts, [len(getattr(request, name)) for name in RAGGED_COLUMNS]
    if starts.shape != (len(totals), rows + 1):
        raise ValueError(f"the offsets of a draft request of {rows} rows have the shape {starts.shape}")
    for name, column, total in zip(RAGGED_COLUMNS, starts.tolist(), totals, strict=True):
        if not _are_offsets(column, total):
            raise ValueError(f"the offsets of {name} in a draft request contradict it")
    if len(request.hidden) and (np.diff(request.hidden_starts) > np.diff(request.new_token_starts)).any():
        raise ValueError("a draft request has more hidden rows than new tokens")


def check_batch(batch: DraftBatch, max_nodes: Int32) -> None:
    """Raise MalformedBatchError unless each row has 1 to ``max_nodes[row]`` nodes and the arrays agree.

    What the nodes hold is checked when a tree is used (``DraftTree.is_valid``).
    """
    rows = len(max_nodes)
    if not len(batch.tokens) == len(batch.parents) == len(batch.scores):
        raise MalformedBatchError(
            f"{len(batch.tokens)} tokens, {len(batch.parents)} parents, {len(batch.scores)} scores"
        )
    starts = batch.node_starts.tolist()
    if len(starts) != rows + 1 or not _are_offsets(starts, len(batch.tokens)):
        raise MalformedBatchError(f"node offsets that contradict {rows} rows of {len(batch.tokens)} nodes")
    sizes = map(sub, starts[1:], starts)
    if any(not 1 <= size <= max(most, 1) for size, most in zip(sizes, max_nodes.tolist(), strict=True)):
        raise MalformedBatchError("a tree without a root, or with more nodes than asked for")


def _are_offsets(starts: list[int], total: int) -> bool:
    """Whether ``starts`` cuts ``total`` items into runs."""
    return starts[0] == 0 and starts[-1] == total and starts == sorted(starts)


def probe_request(epoch: int, step_id: int) -> DraftRequest:
    """A request without rows: the other side answers it without its drafter."""
    no_ids = np.zeros(0, np.int32)
    return DraftRequest(
        epoch,
        step_id,
        rows=np.zeros(0, ROW_DTYPE),
        starts=np.zeros((len(RAGGED_COLUMNS), 1), np.int32),
        new_tokens=no_ids,
        hidden=np.zeros((0, 0), np.float32),
        block_ids=no_ids,
        prediction=no_ids,
    )


def answer(drafter: Drafter, request: DraftRequest) -> DraftBatch:
    """The drafter's reply, checked as the verifier will check it: a drafter's fault shows on its own side."""
    if request.num_rows == 0:
        empty = np.zeros(0, np.int32)
        return DraftBatch(request.epoch, request.step_id, np.zeros(1, np.int32), empty, empty, np.zeros(0, np.float32))
    batch = drafter.draft(request)
    check_batch(batch, request.max_nodes)
    return batch


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of a request that is on its way; only the last part's reply is of use."""

    request: DraftRequest
    is_last: bool


class RequestQueue:
    """Order and back-pressure at the verifier's end: splits, holds back, and pairs replies with requests.

    At most WINDOW parts are on their way; replies come in their order.
    """

    def __init__(
        self,
        max_rows: int,
        token_capacity: int,
        block_size: int,
        counters: TransportCounters,
        *,
        releases_are_answered: bool,
    ) -> None:
        """``token_capacity``: new tokens of one part, at least ``max_rows``. ``block_size``: of the target's cache."""
        assert token_capacity >= max_rows, "the last part of a split request has a token for each row"
        self._max_rows = max_rows
        self._releases_are_answered = releases_are_answered
        self._token_capacity = token_capacity
        self._block_size = block_size
        self._counters = counters
        self._waiting: deque[_Part | tuple[int, ...]] = deque()
        self._in_flight: deque[_Part | None] = deque()
        self._awaited_step_id: int | None = None

    @property
    def is_awaiting(self) -> bool:
        """Whether a reply is wanted: it has not come, and was not given up or dropped."""
        return self._awaited_step_id is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, or waits to be."""
        return not self._in_flight and not self._waiting

    def add(self, request: DraftRequest) -> None:
        """Queue a request. One that is too large, or for a drafter that is too far behind, is dropped."""
        self._awaited_step_id = None
        is_too_large = request.num_rows > self._max_rows or (
            # It is not split.
            request.resident is not None and len(request.block_ids) > self._token_capacity
        )
        if is_too_large or len(self._waiting) > MAX_WAITING:
            self._counters.num_dropped += 1
            return
        parts = split_request(request, self._token_capacity, self._block_size)
        self._waiting.extend(_Part(part, part is parts[-1]) for part in parts)
        self._awaited_step_id = request.step_id
        self._counters.num_posted += request.num_rows > 0

    def add_release(self, slots: Sequence[int]) -> None:
        """Queue a release, in order with the requests. Dropped like them: a slot's next generation forgets too."""
        if len(self._waiting) > MAX_WAITING:
            return
        for low in range(0, len(slots), self._max_rows):
            self._waiting.append(tuple(int(slot) for slot in slots[low : low + self._max_rows]))

    def next(self) -> DraftRequest | tuple[int, ...] | None:
        """What to send now, a request or slots to release; None if there is nothing or the window is full."""
        if not self._waiting or len(self._in_flight) >= WINDOW:
            return None
        part = self._waiting.popleft()
        if isinstance(part, tuple):
            if self._releases_are_answered:
                self._in_flight.append(None)
            return part
        self._in_flight.append(part)
        return part.request

    def take(self, read: Callable[[], DraftBatch | None]) -> DraftBatch | None:
        """Pair a reply with its request; the reply that is awaited comes back checked, any other one is dropped.

        ``read`` is called for the awaited reply only; it gives None for one that cannot be read.
        """
        if not self._in_flight:
            raise TransportClosedError("the drafter sent a reply that nobody asked for")
        part = self._in_flight.popleft()
        if part is None or not part.is_last or part.request.step_id != self._awaited_step_id:
            return None
        self._awaited_step_id = None
        request = part.request
        batch = read()
        try:
            if batch is None:
                raise MalformedBatchError("a reply that cannot be read")
            if (batch.epoch, batch.step_id) != (request.epoch, request.step_id):
                raise MalformedBatchError("a reply with another request's stamp")
            check_batch(batch, request.max_nodes)
        except MalformedBatchError:
            self._counters.num_malformed += 1
            return None
        # Probes have no rows and count for nothing.
        self._counters.num_received += batch.num_rows > 0
        return batch

    def give_up(self) -> None:
        """The awaited reply is late: it is dropped when it comes."""
        if self._awaited_step_id is not None:
            self._awaited_step_id = None
            self._counters.num_late += 1


class InProcessTransport:
    """A drafter in the same process and thread: ``post`` drafts. It isolates nothing and costs nothing."""

    def __init__(
        self,
        drafter: Drafter,
        counters: TransportCounters,
        resident: ResidentMemory | None = None,
    ) -> None:
        """``resident``: memory that the drafter has been given, too."""
        # Drafters without a model need no torch; a verifier has it.
        from foretoken.resident import StreamOrder

        self._resident = resident
        self._order = StreamOrder()
        self._drafter = drafter
        self._counters = counters
        self._batch: DraftBatch | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "in-process"

    @property
    def resident(self) -> ResidentMemory | None:
        return self._resident

    @property
    def order(self) -> StreamOrder:
        """Both sides launch on one stream."""
        return self._order

    def is_open(self) -> bool:
        """Not after the drafter raised."""
        return not self._closed

    def post(self, request: DraftRequest) -> None:
        """Raises TransportClosedError if the drafter raises: it has ended its attachment."""
        with self._lock:
            self._check_open()
            self._batch = None
            self._counters.num_posted += 1
            try:
                self._batch = answer(self._drafter, request)
            except MalformedBatchError:
                self._counters.num_malformed += 1
                return
            except Exception as error:
                self._closed = True
                raise TransportClosedError(f"the drafter raised {error!r}") from error
            if (self._batch.epoch, self._batch.step_id) != (request.epoch, request.step_id):
                self._counters.num_malformed += 1
                self._batch = None

    def receive(self, timeout_s: float) -> DraftBatch | None:
        """Does not wait: the reply is there, or was malformed."""
        with self._lock:
            self._check_open()
            batch, self._batch = self._batch, None
            self._counters.num_received += batch is not None
            return batch

    def is_idle(self) -> bool:
        return True

    def release(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._check_open()
            try:
                self._drafter.release(slots)
            except Exception as error:
                self._closed = True
                raise TransportClosedError(f"the drafter raised {error!r}") from error

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("the transport is closed")
