"""Configurations of the skinny matmul: the few that are worth timing for a shape."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

MAX_ROWS = 128
MAX_SPLIT_K = 4
MAX_CANDIDATES = 6
_MIN_PROGRAMS, _MAX_PROGRAMS = 64, 2200
# Per SM: with more tiles, sums run long enough without parts, and parts would take much memory.
_MAX_SPLIT_TILES = 4
# Rough figures of an H200; they only rank configurations. Bytes a microsecond from memory and from
# the cache that all SMs share; bytes that an SM must have in flight to get its share of memory
# bandwidth; microseconds that a tile's programs wait for each other.
_MEMORY_RATE = 4.2e6
_CACHE_RATE = 8e6
_BYTES_UNDER_WAY = 48 << 10
_WAIT = 1.5


class SkinnyConfig(NamedTuple):
    """A program's tile of the weight, how many programs share a sum, and two compiler settings."""

    block_n: int
    block_k: int
    split_k: int
    num_stages: int
    num_warps: int


class Device(NamedTuple):
    """A GPU's limits.

    Attributes:
        num_sms: streaming multiprocessors (SMs).
        shared_memory: bytes of an SM's shared memory that programs can use.
        is_hopper: compute capability 9: it has the tensor memory accelerator and the tensor cores
            that wide_gate_up needs.
    """

    num_sms: int = 132
    shared_memory: int = 220_000
    is_hopper: bool = False


def block_rows(rows: int) -> int:
    """Return the rows of a tile: 16, 32, 64 or 128, as tensor cores require."""
    return max(16, 1 << (rows - 1).bit_length())


def shared_memory(config: SkinnyConfig, rows: int, gate_up: bool) -> int:
    """Return the bytes of shared memory of a program's pipeline of 16-bit numbers."""
    width = config.block_n * (2 if gate_up else 1) + block_rows(rows)
    return width * config.block_k * 2 * config.num_stages


def candidates(
    rows: int,
    out_features: int,
    in_features: int,
    gate_up: bool = False,
    device: Device | None = None,
    limit: int | None = MAX_CANDIDATES,
) -> list[SkinnyConfig]:
    """Return ``limit`` configurations at most (None: all) for x [rows, in_features], best first.

    There are none for tiny matrices, and none for more than 64 rows, except ``gate_up`` with more
    than 96. For ``gate_up``, ``out_features`` counts the features of the result. The results differ
    in ``block_n`` or ``split_k``, since these two matter most. Row counts with the same tile have
    the same candidates, compiled once.
    """
    device = device or Device()
    best: dict[tuple[int, int], tuple[float, SkinnyConfig]] = {}
    knobs = itertools.product((32, 64, 128), (128, 256), (1, 2, 4), (3, 4, 5))
    if rows > 64:
        # These tiles read nearly as much of x as of the weight, while libraries send x to several
        # SMs at once. Only fusing makes them faster, and only where the library's tiles also have
        # 128 rows: it has some of 96.
        if rows <= 96 or not gate_up:
            return []
        knobs = itertools.product((128,), (64,), (1,), (4,))
    for block_n, block_k, split_k, stages in knobs:
        wide = block_n * (2 if gate_up else 1) >= 128
        config = SkinnyConfig(block_n, block_k, split_k, stages, 8 if wide else 4)
        programs = math.ceil(out_features / block_n) * split_k
        if not _MIN_PROGRAMS <= programs <= _MAX_PROGRAMS or in_features % (block_k * split_k):
            continue
        if split_k > 1 and programs // split_k > _MAX_SPLIT_TILES * device.num_sms:
            continue
        if shared_memory(config, rows, gate_up) > device.shared_memory:
            continue
        found = _estimate(config, block_rows(rows), out_features, in_features, gate_up, device), config
        best[block_n, split_k] = min(found, best.get((block_n, split_k), found))
    return [config for _, config in sorted(best.values())[:limit]]


def _estimate(
    config: SkinnyConfig, rows: int, out_features: int, in_features: int, gate_up: bool, device: Device
) -> float:
    """Return a rough estimate in microseconds, to exclude hopeless configurations."""
    matrices = 2 if gate_up else 1
    programs = math.ceil(out_features / config.block_n) * config.split_k
    resident = max(1, min(device.shared_memory // shared_memory(config, rows, gate_up), 64 // config.num_warps))
    waves = programs / (device.num_sms * resident)
    # SMs without a program in the last wave read nothing.
    idle = math.ceil(waves) / waves
    on_sm = min(resident, math.ceil(programs / device.num_sms))
    under_way = on_sm * config.block_n * matrices * config.block_k * 2 * (config.num_stages - 1)
    reading = matrices * out_features * in_features * 2 / _MEMORY_RATE * max(1.0, _BYTES_UNDER_WAY / under_way)
    inputs = programs * rows * in_features / config.split_k * 2 / _CACHE_RATE
    waiting = 0.0
    if config.split_k > 1:
        waiting = _WAIT + 2 * config.split_k * matrices * rows * out_features * 4 / _CACHE_RATE
    # Inputs arrive while weights arrive, but not for free.
    return reading * min(idle, 2.0) + inputs / 2 + waiting
