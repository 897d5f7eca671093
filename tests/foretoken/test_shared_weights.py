"""All drafters of a host, or of a GPU, share one copy of a target's embedding and head.

Here GPU kernels run on a CPU: the device memory is host memory. On a GPU:
tests/gpu/test_shared_device_weights.py.
"""

from __future__ import annotations

import gc
import mmap
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models import backend
from foretoken.models.backend import CPU, Backend
from foretoken.models.draft_weights import head_rows
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import PanelLayout, RowLayout
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import ArenaLayout, new_memory
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Waiter
from foretoken.transports.shared_weights import SharedWeights, map_weights
from foretoken.transports.transport import TransportCounters

GPU = Backend("gpu", torch.device("cpu"))
DEVICE = "cpu"
ROWS, SIZE = 40, 16
TARGET = TargetInfo("m", ROWS, 1024, max_batch_slots=6, max_nodes=16, hidden_size=SIZE, num_layers=4)
# Layout and element type, as a backend has them.
KINDS = {
    "panels": (CPU, torch.float32),
    "panels of bfloat16": (CPU, torch.bfloat16),
    "panels of float16": (CPU, torch.float16),
    "rows": (GPU, torch.float32),
    "rows of bfloat16": (GPU, torch.bfloat16),
    "rows of float16": (GPU, torch.float16),
}


def weights(kind: str = "rows", *, tied: bool = False) -> TargetWeights:
    backend, dtype = KINDS[kind]
    layout = RowLayout(backend.device, dtype) if backend.kernels == "gpu" else PanelLayout(dtype)
    # Exact in every type.
    rows = torch.arange(ROWS * SIZE, dtype=torch.float32).view(ROWS, SIZE) % 251
    head = layout.matrix(rows)
    return TargetWeights(ROWS, SIZE, tied, layout, head if tied else layout.table(rows + 1), head)


def device_of(kind: str) -> str:
    return "" if KINDS[kind][0] is CPU else DEVICE


def shared_of(kind: str = "rows", *, tied: bool = False) -> SharedWeights:
    return SharedWeights(weights(kind, tied=tied), KINDS[kind][0])


def same(one: TargetWeights, other: TargetWeights) -> bool:
    sizes = [(each.vocab_size, each.hidden_size, each.tied, each.head.dtype) for each in (one, other)]
    return (
        sizes[0] == sizes[1]
        and one.layout == other.layout
        and (one.embedding is one.head) == (other.embedding is other.head)
        and torch.equal(one.head.float(), other.head.float())
        and torch.equal(one.embedding.float(), other.embedding.float())
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_mapped_is_what_was_shared(kind: str, tied: bool) -> None:
    original = weights(kind, tied=tied)
    shared = SharedWeights(original, KINDS[kind][0])
    assert shared.device == device_of(kind)
    mapped = map_weights(shared.filenos(), shared.device)
    assert same(shared.weights, original) and same(mapped, original)
    if kind.startswith("rows"):
        assert mapped.layout == original.layout
    # The drafter reads the owner's memory pages.
    shared.weights.head[-1] = 7
    assert torch.equal(mapped.head.float(), shared.weights.head.float()) and not same(mapped, original)
    shared.weights.head.copy_(original.head)
    shared.close()
    assert same(shared.weights, original) and same(mapped, original)


@pytest.mark.parametrize("kind", ["panels", "rows"])
def test_nobody_else_can_write_or_resize(kind: str) -> None:
    shared = shared_of(kind)
    mapped = map_weights(shared.filenos(), shared.device)
    # A drafter that writes gets memory pages of its own.
    mapped.head.fill_(0)
    assert same(shared.weights, weights(kind))
    for fd in shared.filenos():
        size = os.fstat(fd).st_size
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
    shared.close()


@pytest.mark.parametrize("kind", ["panels", "rows", "rows of bfloat16"])
def test_rows_of_a_token_map_are_a_copy_of_the_shared_heads(kind: str) -> None:
    shared = shared_of(kind)
    mapped = map_weights(shared.filenos(), shared.device)
    ids = torch.tensor([39, 0, 17], dtype=torch.int32).numpy()
    expected = head_rows(weights(kind), ids)
    rows = head_rows(mapped, ids)
    shared.weights.head.fill_(0)
    assert torch.equal(rows.float(), expected.float())


def changed(index: int, value: int | bytes) -> Callable[[bytes], bytes]:
    """Return a function that changes a description's field."""

    def change(data: bytes) -> bytes:
        layout = struct.Struct("<8sI5I4Q64s")
        fields = list(layout.unpack(data))
        fields[index] = value
        return layout.pack(*fields)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "a description of 0 bytes"),
        (lambda data: data[:-1], "a description of"),
        (changed(0, b"FTARENA\0"), "FTARENA"),
        (changed(1, 9), "version 9, this drafter has 2"),
        (changed(2, ROWS + 1), f"do not hold {ROWS + 1} rows of {SIZE}"),
        (changed(3, 2**31), "do not hold"),
        (changed(5, 3), "layout 3 of type 1 is unknown here"),
        (changed(6, 9), "layout 2 of type 9 is unknown here"),
        (changed(7, 4096), "bytes at 4096 of 4096 do not hold"),
        (changed(7, 1 << 40), f"instead of {1 << 40}"),
        (changed(8, 4), "4 bytes at 0"),
        (changed(9, 4100), "at 4100"),
        (changed(9, 1 << 40), f"at {1 << 40}"),
        (changed(11, b"GPU-1"), "are for GPU-1, this drafter runs on cpu"),
        (changed(11, b""), "are for the CPU, this drafter runs on cpu"),
    ],
)
def test_another_description_is_refused(change: Callable[[bytes], bytes], message: str) -> None:
    shared = shared_of()
    description, memory = shared.filenos()
    content = change(os.pread(description, 4096, 0))
    fd = new_memory("test", len(content))
    os.pwrite(fd, content, 0)
    with pytest.raises(PreconditionError, match=message):
        map_weights((fd, memory), DEVICE)
    os.close(fd)
    shared.close()


def test_a_gpu_that_the_drafter_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.transports.shared_weights.device_uuid", lambda _: "GPU-1")
    monkeypatch.setattr(backend.torch.cuda, "device_count", lambda: 0)
    shared = SharedWeights(weights(), GPU)
    with pytest.raises(PreconditionError, match="no GPU GPU-1 here"):
        map_weights(shared.filenos(), "GPU-1")


def attached(shared: SharedWeights, needs: DrafterNeeds) -> tuple[ArenaTransport, ArenaPeer]:
    layout = ArenaLayout.of_target(TARGET, needs, token_capacity=16, weights=True)
    transport = ArenaTransport(layout, 7, bytes(32), TransportCounters(), spin_us=0, weights_fds=shared.filenos())
    listener = ArenaListener()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(ArenaPeer, listener.path, 7, TARGET, needs)
        assert Waiter((listener.fileno(),)).wait(None)
        transport.hand_over(listener.accept())
        peer = fetching.result()
    transport.check_self_test()
    return transport, peer


@pytest.mark.parametrize("kind", KINDS)
def test_the_arena_hands_them_over_and_they_outlive_it(kind: str) -> None:
    shared = shared_of(kind)
    transport, peer = attached(shared, DrafterNeeds(weights=True, device=shared.device))
    got = peer.weights
    assert got is not None and same(got, weights(kind))
    peer.close()
    transport.close()
    shared.close()
    # The verifier is gone.
    del shared
    gc.collect()
    assert same(got, weights(kind))


def test_a_drafter_that_wants_none_maps_none() -> None:
    shared = shared_of()
    transport, peer = attached(shared, DrafterNeeds(device=DEVICE))
    assert peer.weights is None
    peer.close()
    transport.close()


def test_nothing_stays_open() -> None:
    def num_held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("foretoken-weights" in line for line in maps)

    before = num_held()
    for kind in ("panels", "rows"):
        # Nobody closes it, but nobody refers to it any more.
        shared = shared_of(kind)
        transport, peer = attached(shared, DrafterNeeds(weights=True, device=shared.device))
        peer.close()
        transport.close()
        del shared, transport, peer
    # Fewer, if objects of earlier tests have gone meanwhile.
    assert all(now <= then for now, then in zip(num_held(), before, strict=True))
