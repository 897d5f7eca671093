"""The layout of the arena's two memories, and functions that make, seal and map them."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretoken.drafting import (
    RAGGED_COLUMNS,
    ROW_DTYPE,
    DeviceStep,
    DraftBatch,
    DrafterNeeds,
    DraftRequest,
    TargetInfo,
)
from foretoken.errors import PreconditionError
from foretoken.transports.transport import (
    DEFAULT_TOKEN_CAPACITY,
    ROWS_PER_BATCH_SLOT,
    WINDOW,
    check_request,
    overlap_token_capacity,
    token_capacity_for,
)

if TYPE_CHECKING:
    from foretoken.overlap_memory import OverlapLayout

MAGIC = b"FTARENA\0"
LAYOUT_VERSION = 6
CHALLENGE_BYTES = 32
HEADER_BYTES = mmap.PAGESIZE

MEMORY_HOST = 1
DTYPE_NONE = 0
DTYPE_INT32 = 1
DTYPE_FLOAT32 = 2
DTYPE_BFLOAT16 = 3
DTYPE_FLOAT16 = 4
_DTYPE_NAMES = {DTYPE_FLOAT32: "float32", DTYPE_BFLOAT16: "bfloat16", DTYPE_FLOAT16: "float16"}

KIND_DRAFT = 1
KIND_RELEASE = 2
KIND_OVERLAPPED = 3
_BEGINS = 1
_IS_LAST = 2

# Descriptors of every hand-over, of some hand-overs, and the most of all.
_DESCRIPTORS = ("requests", "replies", "request_bell", "reply_bell")
_WEIGHT_DESCRIPTORS = ("weights", "weights_memory")
_OVERLAP_DESCRIPTORS = ("device_memory", "flag_words")
MAX_DESCRIPTORS = len(_DESCRIPTORS) + len(_WEIGHT_DESCRIPTORS) + len(_OVERLAP_DESCRIPTORS)

# Linux 5.1: later mappings cannot be writable. Not in the fcntl module before Python 3.13.
F_SEAL_FUTURE_WRITE = 0x0010
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MAX_MEMORY_BYTES = 1 << 32
# Kind, epoch, step id, rows, tokens, hidden states, blocks, prediction tokens; an overlapped
# step's number, marks, batch rows and first row of prompts' hidden states.
_REQUEST_HEAD = struct.Struct("<12Q")
_REPLY_HEAD = struct.Struct("<4Q")  # epoch, step id, rows, nodes
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The shape of an arena, from which both sides compute every offset.

    Stored in this order, 32 bits a field.
    """

    max_rows: int
    max_nodes: int
    token_capacity: int
    num_buffers: int = WINDOW
    memory: int = MEMORY_HOST
    token_dtype: int = DTYPE_INT32
    # Hidden states for draft heads: as many rows a request as new tokens. Width in elements.
    hidden_dtype: int = DTYPE_NONE
    hidden_width: int = 0
    block_size: int = 16
    # Whether the target's weights are handed over (foretoken.transports.shared_weights).
    has_weights: int = 0
    # Layout of the device memory that is handed over (foretoken.overlap_memory.OverlapLayout); all
    # zero: none.
    overlap_batch_rows: int = 0
    overlap_tokens: int = 0
    overlap_nodes: int = 0
    overlap_width: int = 0
    overlap_dtype: int = DTYPE_NONE
    overlap_prompt_rows: int = 0
    # New tokens, and blocks, of one request that refers to the device memory.
    overlap_capacity: int = 0

    @staticmethod
    def of_target(
        target: TargetInfo,
        needs: DrafterNeeds | None = None,
        token_capacity: int = DEFAULT_TOKEN_CAPACITY,
        *,
        weights: bool = False,
        overlap: OverlapLayout | None = None,
    ) -> ArenaLayout:
        """Return a verifier's layout for this target and a drafter with these needs.

        None: the drafter only needs tokens.

        Args:
            weights: whether the target's weights are handed over.
            overlap: layout of the device memory that is handed over, if any.
        """
        max_rows = ROWS_PER_BATCH_SLOT * target.max_batch_slots
        width = _hidden_width(target, needs)
        return ArenaLayout(
            max_rows,
            target.max_nodes,
            token_capacity_for(max_rows, width, token_capacity),
            hidden_dtype=DTYPE_FLOAT32 if width else DTYPE_NONE,
            hidden_width=width,
            block_size=target.block_size,
            has_weights=int(weights),
            **({} if overlap is None else _overlap_fields(target, overlap)),
        )

    @property
    def overlap(self) -> OverlapLayout | None:
        """The layout of the device memory, if there is some; call ``check`` first."""
        if not self.overlap_batch_rows:
            return None
        # Drafters without a model need no torch.
        import torch

        from foretoken.overlap_memory import OverlapLayout

        return OverlapLayout(
            self.overlap_batch_rows,
            self.overlap_tokens,
            self.overlap_nodes,
            self.overlap_width,
            getattr(torch, _DTYPE_NAMES[self.overlap_dtype]),
            self.overlap_prompt_rows,
        )

    @property
    def descriptors(self) -> tuple[str, ...]:
        """The names of the descriptors that are handed over, in order."""
        return (
            *_DESCRIPTORS,
            *(_WEIGHT_DESCRIPTORS if self.has_weights else ()),
            *(_OVERLAP_DESCRIPTORS if self.overlap_batch_rows else ()),
        )

    def check(self, target: TargetInfo, needs: DrafterNeeds | None = None) -> None:
        """Raise PreconditionError if a drafter of this target cannot use this layout.

        The error has both values.
        """
        width = _hidden_width(target, needs)
        expected = {
            "max_rows": ROWS_PER_BATCH_SLOT * target.max_batch_slots,
            "max_nodes": target.max_nodes,
            "memory": MEMORY_HOST,
            "token_dtype": DTYPE_INT32,
            "hidden_dtype": DTYPE_FLOAT32 if width else DTYPE_NONE,
            "hidden_width": width,
            "block_size": target.block_size,
        }
        if self.overlap_batch_rows:
            if needs is None or not needs.overlaps:
                raise PreconditionError("arena: it has device memory, which this drafter does not use")
            expected |= {"overlap_batch_rows": target.max_batch_slots, "overlap_nodes": target.max_nodes}
            expected |= {"overlap_width": width}
            expected |= {"overlap_capacity": overlap_token_capacity(target, self.overlap_prompt_rows)}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise PreconditionError(f"arena: {name} is {getattr(self, name)}, this drafter needs {value}")
        if not (1 <= self.num_buffers <= 64 and self.max_rows <= self.token_capacity):
            raise PreconditionError(f"arena: {self.num_buffers} buffers of {self.token_capacity} tokens cannot be used")
        if self.overlap_batch_rows and not (
            1 <= self.overlap_tokens <= self.max_nodes and self.overlap_dtype in _DTYPE_NAMES
        ):
            raise PreconditionError(
                f"arena: device memory of {self.overlap_tokens} tokens, type {self.overlap_dtype} is unusable"
            )
        if max(self.request_bytes, self.reply_bytes) > _MAX_MEMORY_BYTES:
            raise PreconditionError(f"arena: larger than {_MAX_MEMORY_BYTES} bytes")

    @property
    def request_stride(self) -> int:
        ragged = len(RAGGED_COLUMNS) * (self.max_rows + 1) + sum(self.ragged_capacity(name) for name in RAGGED_COLUMNS)
        return _aligned(_REQUEST_HEAD.size + ROW_DTYPE.itemsize * self.max_rows + 4 * ragged)

    def ragged_capacity(self, name: str) -> int:
        """Return the number of elements, of four bytes each, that a ragged column can hold."""
        if name == "hidden":
            return self.token_capacity * self.hidden_width
        if name == "prediction":
            return self.token_capacity
        # A row's new tokens may begin inside a block.
        most = max(self.token_capacity, self.overlap_capacity)
        return most + (self.max_rows if name == "block_ids" else 0)

    @property
    def reply_stride(self) -> int:
        return _aligned(_REPLY_HEAD.size + 4 * (self.max_rows + 1) + 12 * self.max_rows * self.max_nodes)

    @property
    def request_bytes(self) -> int:
        return HEADER_BYTES + self.num_buffers * self.request_stride

    @property
    def reply_bytes(self) -> int:
        return HEADER_BYTES + self.num_buffers * self.reply_stride


_HEADER = struct.Struct(f"<8sI{len(fields(ArenaLayout))}IxxxxQ{CHALLENGE_BYTES}s")


def _hidden_width(target: TargetInfo, needs: DrafterNeeds | None) -> int:
    return 0 if needs is None else len(needs.captured_layers) * target.hidden_size


def _overlap_fields(target: TargetInfo, layout: OverlapLayout) -> dict[str, int]:
    codes = {name: code for code, name in _DTYPE_NAMES.items()}
    return {
        "overlap_batch_rows": layout.batch_rows,
        "overlap_tokens": layout.tokens,
        "overlap_nodes": layout.nodes,
        "overlap_width": layout.hidden_width,
        "overlap_dtype": codes[str(layout.hidden_dtype).removeprefix("torch.")],
        "overlap_prompt_rows": layout.prompt_rows,
        "overlap_capacity": overlap_token_capacity(target, layout.prompt_rows),
    }


def _aligned(size: int) -> int:
    """Round up to whole cache lines, so that two buffers never share one."""
    return -(-size // 64) * 64


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """The start of the request memory."""

    layout: ArenaLayout
    epoch: int
    challenge: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, LAYOUT_VERSION, *astuple(self.layout), self.epoch, self.challenge)

    @staticmethod
    def unpack(data: bytes) -> ArenaHeader:
        """Raise PreconditionError for another kind of memory or layout version.

        The error has both values.
        """
        magic, version, *values, epoch, challenge = _HEADER.unpack_from(data)
        # struct keeps trailing zeros, so the magic compares whole.
        if magic != MAGIC:
            raise PreconditionError(f"arena: starts with {magic!r} instead of {MAGIC!r}")
        if version != LAYOUT_VERSION:
            raise PreconditionError(f"arena: layout version {version}, this drafter has {LAYOUT_VERSION}")
        return ArenaHeader(ArenaLayout(*values), epoch, challenge)


def new_memory(name: str, size: int) -> int:
    """Make zeroed memory of ``size`` bytes, without a name in any file system.

    Return its descriptor.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def seal(fd: int, seals: int) -> None:
    """Seal memory for all its holders.

    Without SIZE_SEALS, one could shrink it while another reads.
    """
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def map_memory(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    """Map memory. Raises PreconditionError if it has another size."""
    actual = os.fstat(fd).st_size
    if actual != size:
        raise PreconditionError(f"arena: memory of {actual} bytes, its layout needs {size}")
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


class _Cursor:
    """Returns consecutive arrays of a memory."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    def array(self, dtype: type[Scalar] | np.dtype[Scalar], count: int) -> NDArray[Scalar]:
        array: NDArray[Scalar] = np.frombuffer(self._memory, dtype, count, self._offset)
        self._offset += array.nbytes
        return array


class RequestBuffer:
    """One buffer of the request memory as arrays.

    The rows' records come first, so that all are aligned.
    """

    def __init__(self, memory: mmap.mmap, layout: ArenaLayout, index: int) -> None:
        self._memory = memory
        self._layout = layout
        self._offset = HEADER_BYTES + index * layout.request_stride
        cursor = _Cursor(memory, self._offset + _REQUEST_HEAD.size)
        self._rows = cursor.array(ROW_DTYPE, layout.max_rows)
        # numpy copies records field by field.
        self._row_bytes = _bytes_of(self._rows)
        columns = len(RAGGED_COLUMNS)
        self._starts = cursor.array(np.int32, columns * (layout.max_rows + 1)).reshape(columns, -1)
        self._ragged: dict[str, NDArray[Any]] = {}
        for name in RAGGED_COLUMNS:
            dtype = np.float32 if name == "hidden" else np.int32
            self._ragged[name] = cursor.array(dtype, layout.ragged_capacity(name))
        self._ragged["hidden"] = self._ragged["hidden"].reshape(-1, layout.hidden_width or 1)
        # Only the drafter's side writes to this copy, so only there it takes physical memory.
        self._hidden_copy = np.empty((len(self._ragged["hidden"]), layout.hidden_width), np.float32)

    def write(self, request: DraftRequest) -> None:
        """Write a request that RequestQueue has split, so that it fits."""
        rows = request.num_rows
        values = [getattr(request, name) for name in RAGGED_COLUMNS]
        counts = [len(array) for array in values]
        step = request.device_step
        kind, device = KIND_DRAFT, (0, 0, 0, 0)
        if step is not None:
            marks = (_BEGINS if step.begins else 0) | (_IS_LAST if step.is_last else 0)
            kind, device = KIND_OVERLAPPED, (step.number, marks, step.num_batch_rows, step.prompt_start)
        head = kind, request.epoch, request.step_id, rows, *counts, *device
        _REQUEST_HEAD.pack_into(self._memory, self._offset, *head)
        self._row_bytes[:rows] = _bytes_of(request.rows)
        self._starts[:, : rows + 1] = request.starts
        for room, array, count in zip(self._ragged.values(), values, counts, strict=True):
            if count:
                room[:count] = array

    def write_release(self, batch_slots: tuple[int, ...]) -> None:
        _REQUEST_HEAD.pack_into(self._memory, self._offset, KIND_RELEASE, 0, 0, len(batch_slots), *(0,) * 8)
        self._rows["batch_slots"][: len(batch_slots)] = batch_slots

    def read(self) -> DraftRequest | tuple[int, ...]:
        """Return a private copy of the request, or the batch slots to release.

        Raises ValueError if it exceeds the layout.

        The hidden states are valid until this buffer is read again: allocating megabytes would take
        longer than copying them.
        """
        head = _REQUEST_HEAD.unpack_from(self._memory, self._offset)
        kind, epoch, step_id, rows, *counts, number, marks, num_batch_rows, prompt_start = head
        room = [len(values) for values in self._ragged.values()]
        if rows > self._layout.max_rows or any(count > most for count, most in zip(counts, room, strict=True)):
            raise ValueError(f"a request of {rows} rows and {counts} ragged entries does not fit in the arena")
        if kind == KIND_RELEASE:
            return tuple(self._rows["batch_slots"][:rows].tolist())
        if kind not in (KIND_DRAFT, KIND_OVERLAPPED):
            raise ValueError(f"a request of unknown kind {kind}")
        ragged: dict[str, NDArray[Any]] = {}
        for (name, values), count in zip(self._ragged.items(), counts, strict=True):
            if name != "hidden":
                ragged[name] = values[:count].copy()
            else:
                ragged[name] = self._hidden_copy[:count]
                ragged[name][:] = values[:count]
        records = self._row_bytes[:rows].copy().view(ROW_DTYPE)[:, 0]
        device_step = None
        if kind == KIND_OVERLAPPED:
            device_step = DeviceStep(
                number, bool(marks & _BEGINS), bool(marks & _IS_LAST), num_batch_rows, prompt_start
            )
        starts = self._starts[:, : rows + 1].copy()
        request = DraftRequest(epoch, step_id, records, starts, **ragged, device_step=device_step)
        check_request(request, self._layout.max_rows)
        return request


def _bytes_of(rows: NDArray[np.void]) -> NDArray[np.uint8]:
    """Return a view uint8 [rows, bytes of a record]."""
    return rows.view(np.uint8).reshape(len(rows), ROW_DTYPE.itemsize)


class ReplyBuffer:
    """One buffer of the reply memory, as arrays."""

    def __init__(self, memory: mmap.mmap, layout: ArenaLayout, index: int) -> None:
        self._memory = memory
        self._layout = layout
        self._offset = HEADER_BYTES + index * layout.reply_stride
        cursor = _Cursor(memory, self._offset + _REPLY_HEAD.size)
        self._starts = cursor.array(np.int32, layout.max_rows + 1)
        self._tokens = cursor.array(np.int32, layout.max_rows * layout.max_nodes)
        self._parents = cursor.array(np.int32, layout.max_rows * layout.max_nodes)
        self._scores = cursor.array(np.float32, layout.max_rows * layout.max_nodes)

    def write(self, batch: DraftBatch) -> None:
        """Write a batch that has passed ``check_batch``, so that it fits."""
        rows, nodes = batch.num_rows, len(batch.tokens)
        _REPLY_HEAD.pack_into(self._memory, self._offset, batch.epoch, batch.step_id, rows, nodes)
        self._starts[: rows + 1] = batch.node_starts
        self._tokens[:nodes] = batch.tokens
        self._parents[:nodes] = batch.parents
        self._scores[:nodes] = batch.scores

    def read(self) -> DraftBatch | None:
        """Return a private copy, which ``check_batch`` must check.

        None if it exceeds the layout.
        """
        epoch, step_id, rows, nodes = _REPLY_HEAD.unpack_from(self._memory, self._offset)
        if rows > self._layout.max_rows or nodes > len(self._tokens):
            return None
        starts = self._starts[: rows + 1].copy()
        return DraftBatch(
            epoch,
            step_id,
            starts,
            self._tokens[:nodes].copy(),
            self._parents[:nodes].copy(),
            self._scores[:nodes].copy(),
        )
