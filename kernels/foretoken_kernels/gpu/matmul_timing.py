"""Find the fastest matmuls on this GPU at the first start, and keep the result in a file."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import triton

from foretoken_kernels.gpu.compile_ahead import compiling_ahead
from foretoken_kernels.gpu.graph_capture import captured
from foretoken_kernels.gpu.matmul_choice import (
    ADD,
    GATE_UP,
    QKV,
    ROW_BUCKETS,
    STORE,
    Choices,
    Heads,
    MatmulShape,
    MatmulTable,
)
from foretoken_kernels.gpu.qkv_rope import fits
from foretoken_kernels.gpu.rope_kv_write import Rope
from foretoken_kernels.gpu.skinny_configs import MAX_CANDIDATES, Device, SkinnyConfig, candidates
from foretoken_kernels.gpu.wide_gate_up import wide_gate_up

logger = logging.getLogger(__name__)

# Several times the cache, which would otherwise hold a weight from call to call.
_ROTATED_BYTES = 200 << 20
_REPLAYS = 5
# Disturbances at a start make single times longer, so the best configurations are timed once more.
_TIMED_TWICE = 3
# Positions and KV slots of the rows that are timed.
_NUM_KV_SLOTS = 256
_SPARE_SHARED_MEMORY = 8 << 10

# Returns microseconds of a call with one of the weights.
Measure = Callable[[Callable[[torch.Tensor], None], Sequence[torch.Tensor]], float]


def timed_table(weights: Mapping[MatmulShape, Sequence[torch.Tensor]], path: Path | None = None) -> MatmulTable:
    """Return a table of the fastest matmuls for ``weights``, each timed on the GPU that holds it.

    Without a GPU the table uses PyTorch for all.

    Args:
        weights: matrices of each shape, preferably of all layers: calls use them in turn, so that
            none is in the cache. If there are too few, they are copied for the time of the
            measurement. Only bfloat16 and float16 are timed, and all must have one type. The
            matrices of a GATE_UP or QKV shape are timed unfused too, since fusing must beat that.
        path: JSON file of results. Results for this GPU and these versions are read from it, and
            new ones are written to it.

    Raises:
        ValueError: the file is not a table of matmuls.
    """
    timed = {shape: list(matrices) for shape, matrices in weights.items() if _is_timed(matrices)}
    if not timed:
        return MatmulTable()
    first = next(iter(timed.values()))[0]
    device, dtype = first.device, first.dtype
    for shape in [shape for shape in timed if shape.mode in (GATE_UP, QKV)]:
        timed.setdefault(shape._replace(mode=STORE, out_dtype=dtype, heads=None), timed[shape])
    names = {shape: name_of(shape, dtype) for shape in timed}
    machine = _machine(device)
    kept = read_choices(path, machine) if path is not None else {}
    if any(name not in kept for name in names.values()):
        if path is None:
            kept = _with_missing(timed, names, {}, device)
        else:
            # A verifier and its drafters start together. Two timing at once would disturb each
            # other, and one would overwrite the other's choices.
            with alone(path):
                kept = _with_missing(timed, names, read_choices(path, machine), device)
                write_choices(path, machine, kept)
    choices = {shape: kept[name] for shape, name in names.items()}
    gate_up = [matrices[0] for shape, matrices in timed.items() if shape.mode == GATE_UP]
    return MatmulTable(choices, device, wide_programs(gate_up, device_limits(device)))


def name_of(shape: MatmulShape, dtype: torch.dtype) -> str:
    """Return the name in a file of a shape whose matrices have this type.

    A shape's own key says only the type of the result, which may be float32 for either.
    """
    return shape.key if dtype == torch.bfloat16 else f"{shape.key} of {str(dtype).removeprefix('torch.')}"


def wide_programs(weights: Sequence[torch.Tensor], limits: Device) -> int:
    """Compile the wide kernel for these weights; return its number of programs, 0 for no kernel.

    The kernel is the same for any number of rows, so no later call waits for the compiler.
    """
    if not limits.is_hopper:
        return 0
    for weight in weights:
        x, out = weight.new_zeros(1, weight.shape[1]), weight.new_zeros(1, len(weight) // 2)
        try:
            wide_gate_up(x, weight, out, limits.num_sms)
        except triton.runtime.OutOfResources as error:
            # Another version of the compiler may need more shared memory than there is.
            logger.warning("gate and up of many rows use PyTorch: %s", error)
            return 0
    return limits.num_sms


def _with_missing(
    timed: Mapping[MatmulShape, Sequence[torch.Tensor]],
    names: Mapping[MatmulShape, str],
    kept: dict[str, Choices],
    device: torch.device,
) -> dict[str, Choices]:
    """Return ``kept`` plus choices for the shapes that it lacks, by their names."""
    missing = {shape: matrices for shape, matrices in timed.items() if names[shape] not in kept}
    if not missing:
        return kept
    known = {shape: kept[name] for shape, name in names.items() if name in kept}
    found = choose(missing, known, device, device_limits(device), graph_microseconds)
    return kept | {names[shape]: by_rows for shape, by_rows in found.items()}


def _is_timed(matrices: Sequence[torch.Tensor]) -> bool:
    return bool(matrices) and matrices[0].is_cuda and matrices[0].dtype in (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock on the file; another process waits. The lock ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def choose(
    weights: Mapping[MatmulShape, Sequence[torch.Tensor]],
    known: Mapping[MatmulShape, Choices],
    device: torch.device | str,
    limits: Device,
    measure: Measure,
) -> dict[MatmulShape, Choices]:
    """Return the fastest of PyTorch's matmul and the candidates for each shape and row bucket."""
    table = MatmulTable(known, device)
    table.reserve(max(_split_features(shape, limits) for shape in weights))
    if device != "cpu":
        _compile_candidates(table, weights, limits)
    found: dict[MatmulShape, Choices] = {}
    # Plain matmuls first, since a fused matmul is compared with the best plain one.
    for shape in sorted(weights, key=lambda shape: shape.mode in (GATE_UP, QKV)):
        matrices = list(weights[shape][: -(-_ROTATED_BYTES // weights[shape][0].nbytes)])
        if device != "cpu":
            missing = _ROTATED_BYTES - sum(matrix.nbytes for matrix in matrices)
            matrices += [matrices[0].clone() for _ in range(-(-missing // matrices[0].nbytes))]
        found[shape] = {rows: _fastest(table, shape, rows, matrices, limits, measure) for rows in ROW_BUCKETS}
        table.choose(shape, found[shape])
    return found


def _compile_candidates(
    table: MatmulTable, weights: Mapping[MatmulShape, Sequence[torch.Tensor]], limits: Device
) -> None:
    """Compile all candidates at once; one after the other they take most of a first start."""
    with compiling_ahead():
        for shape, (weight, *_) in weights.items():
            for rows in ROW_BUCKETS:
                run = _runner(table, shape, rows, weight)
                for config in _candidates(shape, rows, limits):
                    run(config, weight)


def _runner(
    table: MatmulTable, shape: MatmulShape, rows: int, weight: torch.Tensor
) -> Callable[[SkinnyConfig | None, torch.Tensor], None]:
    """Return what runs a matmul of so many rows with a configuration and a weight like this one."""
    dtype, device = weight.dtype, weight.device
    x = torch.randn(rows, shape.in_features, device=device).to(dtype)
    wide = torch.zeros(
        rows, shape.out_features, device=device, dtype=dtype if shape.mode == GATE_UP else shape.out_dtype
    )
    out = torch.zeros(rows, shape.out_features // 2, device=device, dtype=shape.out_dtype)
    rope = None if shape.heads is None else _rope(shape.heads, rows, dtype, device)

    def run(config: SkinnyConfig | None, weight: torch.Tensor) -> None:
        if rope is not None:
            table.qkv_by(config, x, weight, wide, rope)
        elif shape.mode == GATE_UP:
            table.gate_up_by(config, x, weight, wide, out)
        else:
            table.matmul_by(config, x, weight, wide, shape.mode == ADD)

    return run


def _fastest(
    table: MatmulTable,
    shape: MatmulShape,
    rows: int,
    weights: Sequence[torch.Tensor],
    limits: Device,
    measure: Measure,
) -> SkinnyConfig | None:
    run = _runner(table, shape, rows, weights[0])
    times = {}
    configs: list[SkinnyConfig | None] = [None, *_candidates(shape, rows, limits)]
    for config in configs:
        # Another version of the compiler may need more registers or shared memory than there are.
        # Then the configuration is not a choice.
        with contextlib.suppress(triton.runtime.OutOfResources):
            times[config] = measure(functools.partial(run, config), weights)
    for config in sorted(times, key=times.__getitem__)[:_TIMED_TWICE]:
        times[config] = min(times[config], measure(functools.partial(run, config), weights))
    best = min(times, key=times.__getitem__)
    logger.debug("%s, %d rows: %.1f us, by PyTorch %.1f us, %s", shape.key, rows, times[best], times[None], best)
    return best


def _rope(heads: Heads, rows: int, dtype: torch.dtype, device: torch.device) -> Rope:
    """Make arguments of rope_kv_write whose rows are side by side in a small cache."""
    num_heads, num_kv_heads, head_dim, has_bias, has_norm = heads
    bias = torch.zeros((num_heads + 2 * num_kv_heads) * head_dim, device=device) if has_bias else None
    norm = torch.ones(head_dim, device=device) if has_norm else None
    places = torch.arange(rows, dtype=torch.int32, device=device)
    keys, values = torch.zeros(2, _NUM_KV_SLOTS, num_kv_heads, head_dim, dtype=dtype, device=device)
    angles = torch.zeros(_NUM_KV_SLOTS, 2, head_dim // 2, device=device)
    return Rope(bias, norm, norm, 1e-6, angles, places, places, keys, values, num_heads)


def _candidates(shape: MatmulShape, rows: int, limits: Device) -> list[SkinnyConfig]:
    if shape.heads is not None:
        _, _, head_dim, _, has_norm = shape.heads
        found = candidates(rows, shape.out_features, shape.in_features, device=limits, limit=None)
        return [config for config in found if fits(config, head_dim, has_norm)][:MAX_CANDIDATES]
    fused = shape.mode == GATE_UP
    return candidates(rows, shape.out_features // 2 if fused else shape.out_features, shape.in_features, fused, limits)


def _split_features(shape: MatmulShape, limits: Device) -> int:
    """Return how many features may have partial sums."""
    splits = [config.split_k for rows in ROW_BUCKETS for config in _candidates(shape, rows, limits)]
    return shape.out_features if max(splits, default=1) > 1 else 0


def graph_microseconds(call: Callable[[torch.Tensor], None], weights: Sequence[torch.Tensor]) -> float:
    """Return the median microseconds of one call, in a CUDA graph with one call a weight."""
    stream = torch.cuda.Stream(weights[0].device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(weights[0].device))
    with torch.cuda.stream(stream):
        call(weights[0])  # compiles, and lets libraries allocate
        stream.synchronize()

        def call_all() -> None:
            for weight in weights:
                call(weight)

        graph = captured(call_all)
        graph.replay()
        times: list[float] = []
        for _ in range(_REPLAYS):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / len(weights)


def device_limits(device: torch.device) -> Device:
    """Return a GPU's limits."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"] - _SPARE_SHARED_MEMORY, is_hopper)


def _machine(device: torch.device) -> str:
    """Return a key of the results: times of another GPU, library or compiler do not apply."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{torch.cuda.get_device_name(device)}, {versions}, {torch.backends.cuda.preferred_blas_library()}"


def read_choices(path: Path, machine: str) -> dict[str, Choices]:
    """Return the choices for ``machine`` by MatmulShape.key; none if there is no file.

    Raises:
        ValueError: the file is not a table written by write_choices.
    """
    if not path.exists():
        return {}
    try:
        found = {
            key: {int(rows): None if config is None else SkinnyConfig(*map(int, config)) for rows, config in by_rows}
            for key, by_rows in json.loads(path.read_text()).get(machine, {}).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a table of matmuls; delete it to time them again") from error
    # Drop choices for other row buckets, written by another version: they are timed again.
    return {key: by_rows for key, by_rows in found.items() if tuple(by_rows) == ROW_BUCKETS}


def write_choices(path: Path, machine: str, choices: Mapping[str, Choices]) -> None:
    """Write ``machine``'s choices to the file, beside other machines' choices.

    Readers see either the old file or the new one.
    """
    tables = json.loads(path.read_text()) if path.exists() else {}
    tables[machine] = {key: list(by_rows.items()) for key, by_rows in choices.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(tables, indent=1))
    temporary.replace(path)
