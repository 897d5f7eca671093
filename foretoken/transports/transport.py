"""The protocol of all transports between a verifier and a drafter.

Their request queue and their checks are here, too.

A transport moves each ``DraftRequest`` one way and its ``DraftBatch`` back, in order. It knows
neither policies nor models. There are three: the arena (arena.py), the gRPC stream
(verifier_svc/drafters/stream.py) and the one for a drafter in the same process (in_process.py).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from foretoken.drafter import Drafter
from foretoken.drafting import RAGGED_COLUMNS, ROW_DTYPE, DraftBatch, DraftRequest, TargetInfo
from foretoken.transports.draft_parts import split_request
from foretoken.tree import Int32

if TYPE_CHECKING:
    from foretoken.overlap_memory import OverlapMemory

# New tokens of one request on the wire. Larger requests are split; four long prompts take a few
# parts.
DEFAULT_TOKEN_CAPACITY = 8192
# Bytes of hidden states of one request at most; larger requests are split. This bounds an arena's
# buffers.
MAX_HIDDEN_BYTES = 16 << 20
# A request has a row for each running sequence, and for each sequence that ended since the last
# request.
ROWS_PER_BATCH_SLOT = 2
# Requests that may be unanswered. Further ones wait at the verifier.
WINDOW = 4
# Requests that may wait before new ones are dropped: a drafter so far behind is as good as gone.
MAX_WAITING = 1024


class TransportClosedError(Exception):
    """The other side is gone, or it sent something that ended the attachment.

    The transport is unusable.
    """


def token_capacity_for(
    max_rows: int, hidden_width: int, most: int = DEFAULT_TOKEN_CAPACITY, hidden_bytes: int = MAX_HIDDEN_BYTES
) -> int:
    """Return how many new tokens one request may carry.

    Each has ``hidden_width`` float32 values.
    """
    if hidden_width:
        most = min(most, hidden_bytes // (4 * hidden_width))
    return max(most, max_rows)


def overlap_token_capacity(target: TargetInfo, prompt_rows: int) -> int:
    """Return how many new tokens a request with prompt rows may carry.

    It is not split. One prompt may begin with a cached prefix of any length.
    """
    return max(DEFAULT_TOKEN_CAPACITY, target.max_model_len) + prompt_rows


class MalformedBatchError(ValueError):
    """A reply that cannot be used: its counts contradict each other or the request."""


class DraftTransport(ABC):
    """The verifier's end of a transport.

    The engine thread uses it; any thread may call ``close``.

    Attributes:
        name: shared-memory, grpc or in-process.
        overlap_memory: the device memory shared with the drafter; None: there is none, and no
            request may refer to it. Queued work may use this and ``order`` after ``close``; they
            live until their last user is gone.
        order: between the verifier's work on the device memory and the drafter's.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        # Drafters without a model need no torch; a verifier has it.
        from foretoken.overlap_memory import StreamOrder

        self.overlap_memory: OverlapMemory | None = None
        self.order = StreamOrder()
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def is_open(self) -> bool:
        """Return whether the connection to the drafter is open; the drafter may still hang.

        Takes microseconds.
        """

    @abstractmethod
    def post(self, request: DraftRequest) -> None:
        """Send a request without waiting. Raises TransportClosedError if the drafter is gone."""

    def post_unawaited(self, request: DraftRequest) -> None:
        """Send a request whose reply no step waits for. Raises as ``post``.

        A drafter in this process may begin with it as late as ``begin_unawaited``.
        """
        self.post(request)

    def begin_unawaited(self, least: int = 0) -> None:
        """Let a drafter in this process begin with unawaited requests, beside what the caller does.

        Args:
            least: new tokens from which it runs on another thread; fewer are learned on the
                caller's.
        """
        return

    @abstractmethod
    def receive(self, timeout_s: float) -> DraftBatch | None:
        """Return the reply to the last request, checked by ``check_batch``.

        Older replies are dropped.

        None if it did not arrive in time or was malformed. The request then counts as unanswered,
        and a late reply is dropped. Raises TransportClosedError as soon as the drafter is gone.
        """

    @abstractmethod
    def is_idle(self) -> bool:
        """Return whether the drafter has answered everything that was sent.

        Replies that nobody awaits are dropped.

        Raises TransportClosedError if the drafter is gone.
        """

    @abstractmethod
    def release(self, batch_slots: Sequence[int]) -> None:
        """Make the drafter forget batch slots before it sees any later request. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("the transport is closed")


@dataclass(slots=True)
class TransportCounters:
    """Counts of one drafter's failed requests and replies. Only the engine thread writes them."""

    # Requests without a reply in time, replies that were malformed or had another request's ids,
    # and requests that were never sent because the drafter was too far behind.
    num_late: int = 0
    num_malformed: int = 0
    num_dropped: int = 0

    @property
    def num_rejected(self) -> int:
        return self.num_late + self.num_malformed + self.num_dropped


def check_request(request: DraftRequest, max_rows: int) -> None:
    """Raise ValueError unless the offsets of all ragged columns are valid."""
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
        raise ValueError("a draft request has more hidden states than new tokens")
    step = request.device_step
    if step is None:
        return
    if not 0 <= step.num_batch_rows <= rows:
        raise ValueError(f"a draft request of {rows} rows has {step.num_batch_rows} batch rows")
    counts, device_hidden = np.diff(request.new_token_starts), request.device_hidden
    if counts[: step.num_batch_rows].any() or (device_hidden < 0).any() or (device_hidden > counts).any():
        raise ValueError("a draft request has new tokens in a batch row, or more hidden states than new tokens")


def check_batch(batch: DraftBatch, max_nodes: Int32) -> None:
    """Raise MalformedBatchError unless each row has 1 to ``max_nodes[row]`` nodes.

    The arrays must also agree.

    The nodes' content is checked when a tree is used (``DraftBatch.are_sound``).
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
    """Return whether ``starts`` divides ``total`` items into runs."""
    return starts[0] == 0 and starts[-1] == total and starts == sorted(starts)


def probe_request(epoch: int, step_id: int) -> DraftRequest:
    """Return a request without rows, which the other side answers without its drafter."""
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
    """Return the drafter's reply, checked as the verifier will check it.

    So a fault shows at the drafter.
    """
    if request.num_rows == 0 and request.device_step is None:
        empty = np.zeros(0, np.int32)
        return DraftBatch(request.epoch, request.step_id, np.zeros(1, np.int32), empty, empty, np.zeros(0, np.float32))
    batch = drafter.draft(request)
    check_batch(batch, request.max_nodes)
    return batch


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of a request. Only the reply to the last part matters."""

    request: DraftRequest
    is_last: bool


class RequestQueue:
    """The verifier's queue: splits requests, and pairs replies with requests.

    At most WINDOW parts are unanswered.

    Replies arrive in the order of the parts.
    """

    def __init__(
        self,
        max_rows: int,
        token_capacity: int,
        block_size: int,
        counters: TransportCounters,
        *,
        releases_are_answered: bool,
        overlap_capacity: int = 0,
    ) -> None:
        """``token_capacity``: new tokens of one part, at least ``max_rows``.

        ``block_size``: of the target. ``overlap_capacity``: new tokens, and blocks, of a request
        that refers to device memory.
        """
        assert token_capacity >= max_rows, "the last part of a split request has a token for each row"
        self._max_rows = max_rows
        self._releases_are_answered = releases_are_answered
        self._token_capacity = token_capacity
        self._overlap_capacity = overlap_capacity
        self._block_size = block_size
        self._counters = counters
        self._waiting: deque[_Part | tuple[int, ...]] = deque()
        self._in_flight: deque[_Part | None] = deque()
        self._awaited_step_id: int | None = None

    @property
    def is_awaiting(self) -> bool:
        """Return whether a reply is awaited: it has not arrived, and was not given up or dropped."""
        return self._awaited_step_id is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Return whether no part is unanswered or waiting."""
        return not self._in_flight and not self._waiting

    def add(self, request: DraftRequest) -> None:
        """Queue a request. Drop it if it is too large or the drafter is too far behind."""
        self._awaited_step_id = None
        is_too_large = request.num_rows > self._max_rows or (
            # Such a request is not split.
            request.device_step is not None
            and max(len(request.new_tokens), len(request.block_ids)) > self._overlap_capacity
        )
        if is_too_large or len(self._waiting) > MAX_WAITING:
            self._counters.num_dropped += 1
            return
        parts = split_request(request, self._token_capacity, self._block_size)
        self._waiting.extend(_Part(part, part is parts[-1]) for part in parts)
        self._awaited_step_id = request.step_id

    def add_release(self, batch_slots: Sequence[int]) -> None:
        """Queue a release, in order with the requests.

        It may be dropped like them: a batch slot's next generation also makes the drafter forget.
        """
        if len(self._waiting) > MAX_WAITING:
            return
        for low in range(0, len(batch_slots), self._max_rows):
            self._waiting.append(tuple(int(batch_slot) for batch_slot in batch_slots[low : low + self._max_rows]))

    def next(self) -> DraftRequest | tuple[int, ...] | None:
        """Return what to send now, a request or batch slots to release.

        None if nothing waits or the window is full.
        """
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
        """Pair a reply with its request; return the awaited reply, checked, and drop any other.

        ``read`` is only called for the awaited reply and returns None if it cannot be read.

        Raises TransportClosedError for a reply to no request.
        """
        if not self._in_flight:
            raise TransportClosedError("the drafter sent a reply to no request")
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
        return batch

    def give_up(self) -> None:
        """Count the awaited reply as late; it is dropped when it arrives."""
        if self._awaited_step_id is not None:
            self._awaited_step_id = None
            self._counters.num_late += 1


class QueuedTransport(DraftTransport):
    """Sends a RequestQueue's rows to another process and takes replies as they come."""

    def __init__(self, queue: RequestQueue) -> None:
        super().__init__()
        self._queue = queue

    def post(self, request: DraftRequest) -> None:
        with self._lock:
            self._check_open()
            self._queue.add(request)
            self._take_replies()
            self._send()

    def is_idle(self) -> bool:
        with self._lock:
            self._check_open()
            self._take_replies()
            self._send()
            return self._queue.is_idle

    def release(self, batch_slots: Sequence[int]) -> None:
        with self._lock:
            self._check_open()
            self._queue.add_release(batch_slots)
            self._take_replies()
            self._send()

    @abstractmethod
    def fileno(self) -> int:
        """Return a descriptor that is readable when the drafter is gone."""

    def _send(self) -> None:
        """Write what the window allows."""
        while (message := self._queue.next()) is not None:
            self._write(message)

    @abstractmethod
    def _write(self, message: DraftRequest | tuple[int, ...]) -> None:
        """Send a request, or batch slots to release."""

    @abstractmethod
    def _take_replies(self) -> DraftBatch | None:
        """Pair all replies that have arrived with their requests; return the awaited one."""
