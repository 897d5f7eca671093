from __future__ import annotations

import pytest
import torch
from foretoken_kernels import reference
from foretoken_kernels.gpu.kv_commit import copy_kv_slots, kv_commit
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK_SIZE = 4


def moves(
    accepted: list[list[int]], roots: list[int], tables: torch.Tensor, block_size: int
) -> tuple[list[int], list[int]]:
    """Return the moves of verifier_svc.scheduling.batch.commit_kv_slots for all sequences."""
    source, target = [], []
    for path, root, table in zip(accepted, roots, tables.tolist(), strict=True):
        for depth, node in enumerate(path, start=1):
            if node != depth:
                for kv_slots, logical in ((source, root + node), (target, root + depth)):
                    kv_slots.append(table[logical // block_size] * block_size + logical % block_size)
    return source, target


def check(
    paths: list[list[int]], roots: list[int], planes: int, kv_slot_size: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(len(paths))
    blocks = 6 * len(paths)
    # A layer's keys and values, as in KVCache.
    data = torch.randn(planes // 2, 2, blocks, BLOCK_SIZE, kv_slot_size, device=device).to(dtype)
    cache = data.view(planes, blocks * BLOCK_SIZE, kv_slot_size)
    tables = torch.randperm(blocks).view(len(paths), 6).int()
    depth = max(map(len, paths)) + 1
    accepted = torch.full((len(paths), depth), 2**31 - 1, dtype=torch.int32)
    for row, path in zip(accepted, paths, strict=True):
        row[: len(path)] = torch.tensor(path)
    expected = cache.clone()
    reference.kv_commit(expected, *map(torch.tensor, moves(paths, roots, tables, BLOCK_SIZE)))
    counts = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device)
    positions = torch.tensor(roots, dtype=torch.int32, device=device)
    kv_commit(cache, accepted.to(device), counts, positions, tables.to(device), BLOCK_SIZE)
    assert torch.equal(cache, expected)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sets(st.integers(1, 12), max_size=6), st.integers(0, 11)), min_size=1, max_size=3))
def test_kv_commit(device: str, sequences: list[tuple[set[int], int]]) -> None:
    check([sorted(path) for path, _ in sequences], [root for _, root in sequences], 2, 8, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_slots_of_several_pieces(dtype: torch.dtype, device: str) -> None:
    check([[2, 3, 7], [], [1, 4]], [5, 0, 9], 4, 1100, dtype, device)


def test_paths_of_more_moves_than_are_made_at_once(device: str) -> None:
    check([list(range(2, 22)), list(range(1, 18, 2))], [1, 0], 2, 8, torch.float32, device)


def test_what_was_moved_away_may_be_overwritten(device: str) -> None:
    # Node 2 moves to 1, then 3 to 2's place, then 4 to 3's.
    cache = torch.arange(8.0, device=device).view(1, 8, 1).clone()
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 3, 4]], [3], [1], [[0, 1]])]
    kv_commit(cache, *ints, block_size=4)
    assert cache.flatten().tolist() == [0, 1, 3, 4, 5, 5, 6, 7]


@pytest.mark.parametrize(
    ("node", "root", "block"),
    [(40, 1, 1), (-9, 1, 1), (3, -2, 1), (2, 2**31 - 1, 1), (2, 9, 1), (3, 1, -1), (3, 1, 2), (3, 1, 2**31 - 1)],
)
def test_moves_from_or_to_nowhere_are_left_out(node: int, root: int, block: int, device: str) -> None:
    # Two blocks more than the kernel knows of: the test would see a write there.
    pool = torch.randn(1, 16, 3, device=device)
    before = pool.clone()
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[node]], [1], [root], [[0, block]])]
    kv_commit(pool[:, :8], *ints, block_size=4)
    assert torch.equal(pool, before)


def test_more_accepted_than_the_path_is_long(device: str) -> None:
    cache = torch.arange(8.0, device=device).view(1, 8, 1).clone()
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([[3]], [99], [0], [[0, 1]])]
    kv_commit(cache, *ints, block_size=4)
    assert cache.flatten().tolist() == [0, 3, 2, 3, 4, 5, 6, 7]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_copy_kv_slots_is_sequential(device: str, pairs: list[tuple[int, int]]) -> None:
    cache = torch.randn(2, 6, 5, device=device)
    source = torch.tensor([src for src, _ in pairs], dtype=torch.int32, device=device)
    target = torch.tensor([dst for _, dst in pairs], dtype=torch.int32, device=device)
    expected = cache.clone()
    reference.kv_commit(expected, source, target)
    copy_kv_slots(cache, source, target)
    assert torch.equal(cache, expected)


def test_copy_kv_slots_leaves_out_what_is_not_there(device: str) -> None:
    pool = torch.randn(2, 6, 1100, device=device)
    expected = pool.clone()
    expected[:, 1] = expected[:, 3]
    source = torch.tensor([0, -1, 4, 3], device=device)
    target = torch.tensor([4, 1, 0, 1], device=device)
    copy_kv_slots(pool[:, :4], source, target)
    assert torch.equal(pool, expected)


def test_refuses_other_shapes(device: str) -> None:
    cache = torch.zeros(2, 8, 6, device=device)
    ints = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="contiguous KV slots"):
        copy_kv_slots(cache[:, :, ::2], ints, ints)
    with pytest.raises(ValueError, match="fewer counts"):
        kv_commit(cache, ints.view(3, 1), ints[:2], ints, ints.view(3, 1), 4)


@pytest.mark.gpu
def test_kv_commit_of_real_sizes(device: str) -> None:
    paths = [[1, 2, 3], [2, 5, 9, 12], [], [3], [1, 4, 5, 6, 7]] * 6
    check(paths, [i % 11 for i in range(30)], 64, 1024, torch.bfloat16, device)
