from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import triton
from foretoken_kernels import reference
from foretoken_kernels.gpu import matmul_choice, matmul_timing
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
from foretoken_kernels.gpu.matmul_timing import (
    alone,
    choose,
    name_of,
    read_choices,
    timed_table,
    wide_programs,
    write_choices,
)
from foretoken_kernels.gpu.rope_kv_write import Rope
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig, candidates

from tests.support.environment import child_environment

SKINNY = SkinnyConfig(16, 16, 2, 2, 4)


def by_rows(**chosen: SkinnyConfig) -> dict[int, SkinnyConfig | None]:
    """Return SKINNY for rows given as e.g. ``r4=SKINNY``, PyTorch for the rest."""
    return {rows: chosen.get(f"r{rows}") for rows in ROW_BUCKETS}


def check(table: MatmulTable, rows: int, out_dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 40, device=device)[:, :32], torch.randn(48, 32, device=device)
    buffer = torch.randn(rows, 60, device=device).to(out_dtype)
    out, before = buffer[:, :48], buffer.clone()
    expected = reference.linear(x, weight)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if out_dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.3}
    table.matmul(x, weight, out)
    torch.testing.assert_close(out.float(), expected, **tolerance)
    table.matmul(x, weight, out, add=True)
    torch.testing.assert_close(out.float(), 2 * expected, **tolerance)
    half = torch.empty(rows, 24, device=device, dtype=out_dtype)
    table.gate_up(x, weight, torch.empty(rows, 48, device=device), half)
    torch.testing.assert_close(half.float(), reference.silu_and_multiply(*expected.chunk(2, dim=1)), **tolerance)
    assert torch.equal(buffer[:, 48:], before[:, 48:])


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 70, 130])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_choice_gives_the_matmul(rows: int, out_dtype: torch.dtype, device: str) -> None:
    if device == "cpu" or out_dtype == torch.float32:
        check(MatmulTable(), rows, out_dtype, device)
    shapes = [MatmulShape(48, 32, mode, out_dtype) for mode in (STORE, ADD, GATE_UP)]
    everywhere = dict.fromkeys(ROW_BUCKETS, SKINNY)
    if rows <= ROW_BUCKETS[-1]:
        check(MatmulTable(dict.fromkeys(shapes, everywhere), device), rows, out_dtype, device)


def test_row_counts_are_rounded_up_to_a_bucket() -> None:
    shape = MatmulShape(48, 32, STORE)
    table = MatmulTable({shape: by_rows(r4=SKINNY, r64=SKINNY, r128=SKINNY)})
    skinny = [rows for rows in range(140) if table.choice(shape, rows)]
    assert skinny == [3, 4, *range(49, 65), *range(97, 129)]
    assert table.choice(shape._replace(mode=ADD), 4) is None
    assert table.choice(shape._replace(out_dtype=torch.float32), 4) is None


def test_choices_are_for_all_buckets() -> None:
    with pytest.raises(ValueError, match="rows, not for"):
        MatmulTable({MatmulShape(48, 32, STORE): {1: SKINNY}})


def test_gate_and_up_of_many_rows_take_the_wide_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do where their tiles fill the GPU; the buffer before the activation stays unused."""
    monkeypatch.setattr(matmul_choice, "fits_wide_gate_up", lambda x, weight: True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    like = {"dtype": dtype, "device": device}
    shape = MatmulShape(512, 64, GATE_UP, dtype)
    table = MatmulTable({shape: dict.fromkeys(ROW_BUCKETS)}, device, wide_programs=2)
    taken = []
    for rows in (1, 128, 129, 192, 256):
        x, weight = torch.randn(rows, 64, **like), torch.randn(512, 64, **like) / 8
        gate_up, out = torch.zeros(rows, 512, **like), torch.empty(rows, 256, **like)
        table.gate_up(x, weight, gate_up, out)
        expected = reference.silu_and_multiply(*reference.linear(x.float(), weight.float()).chunk(2, dim=1))
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        taken.append(not gate_up.any())
    assert taken == [False, False, False, False, True]


@pytest.mark.parametrize("rows", [1, 5, 70, 130])
@pytest.mark.parametrize("config", [None, SkinnyConfig(32, 16, 2, 2, 4)])
def test_queries_keys_and_values(rows: int, config: SkinnyConfig | None, device: str) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 40, device=device)[:, :32], torch.randn(64, 32, device=device)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    angles = torch.randn(rows, 2, 8, device=device)
    cache, expected_cache = torch.zeros(2, 2, rows, 1, 16, device=device)
    rope = Rope(None, None, None, 1e-6, angles, places, places, cache[0], cache[1], 2)
    expected = reference.rope_kv_write(
        reference.linear(x, weight).view(rows, 4, 16), *rope[:7], expected_cache[0], expected_cache[1]
    )
    shape = MatmulShape(64, 32, QKV, torch.float32, Heads.of(rope))
    table = MatmulTable({shape: dict.fromkeys(ROW_BUCKETS, config)}, device)
    out = torch.zeros(rows, 64, device=device)
    table.qkv(x, weight, out, rope)
    torch.testing.assert_close(out[:, :32].view(rows, 2, 16), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-4)
    # A fused kernel does not write keys and values to ``out``.
    assert bool(out[:, 32:].any()) == (config is None or rows > ROW_BUCKETS[-1])


def test_the_fastest_is_chosen(device: str) -> None:
    limits = Device(132, 220_000)
    heads, normed = Heads(24, 4, 128, True, False), Heads(24, 4, 128, False, True)
    shapes = [
        MatmulShape(4096, 128, GATE_UP),
        MatmulShape(4096, 128, STORE),
        MatmulShape(4096, 128, QKV, heads=heads),
        MatmulShape(4096, 512, QKV, heads=normed),
        MatmulShape(2048, 256, ADD),
    ]
    weights = {
        shape: [torch.randn(shape.out_features, shape.in_features, device=device).bfloat16()] for shape in shapes
    }
    prices = itertools.cycle([5.0, 7.0, 3.0])

    def measure(call: Callable[[torch.Tensor], None], matrices: Sequence[torch.Tensor]) -> float:
        return next(prices)

    found = choose(weights, {}, "cpu", limits, measure)
    prices = itertools.cycle([5.0, 7.0, 3.0])
    # What may be fused is timed after the plain matmuls that it must beat.
    assert list(found) == [shapes[1], shapes[4], shapes[0], shapes[2], shapes[3]]
    for shape, chosen in found.items():
        fused = shape.mode == GATE_UP
        for rows in ROW_BUCKETS:
            made = candidates(rows, shape.out_features // (1 + fused), shape.in_features, fused, limits, limit=None)
            if shape.heads == normed:
                made = [config for config in made if config.block_n == 128]
            ways = [None, *made[:6]]
            assert len(ways) > 1 or rows > 64
            times = {way: next(prices) for way in ways}
            for way in sorted(times, key=times.__getitem__)[:3]:
                times[way] = min(times[way], next(prices))
            assert chosen[rows] == min(times, key=times.__getitem__)
    assert len(set(chosen for choices in found.values() for chosen in choices.values())) > 2


def test_the_best_are_timed_twice() -> None:
    """A disturbance makes the fastest one's first time longer."""
    shape = MatmulShape(4096, 128, STORE)
    asked: list[float] = []

    def measure(call: Callable[[torch.Tensor], None], matrices: Sequence[torch.Tensor]) -> float:
        ways = len(candidates(1, 4096, 128)) + 1
        which, again = len(asked) % (ways + 3), len(asked) % (ways + 3) >= ways
        asked.append(1.0 if again and which == ways + 1 else 2.0 + which / 8)
        return asked[-1]

    found = choose({shape: [torch.zeros(4096, 128).bfloat16()]}, {}, "cpu", Device(), measure)
    # The second of the three.
    assert found[shape][1] == candidates(1, 4096, 128)[0]


def test_shapes_have_names_of_their_own() -> None:
    heads = Heads(32, 8, 128, True, False)
    shapes = [MatmulShape(48, 32, mode, dtype) for mode in (STORE, ADD) for dtype in (torch.float32, torch.bfloat16)]
    shapes += [MatmulShape(48, 32, QKV, heads=heads._replace(has_bias=bias)) for bias in (False, True)]
    shapes += [MatmulShape(48, 32, QKV, heads=heads._replace(has_norm=True, num_heads=count)) for count in (16, 32)]
    assert len({shape.key for shape in shapes}) == len(shapes)
    assert shapes[5].key == "48x32 qkv bfloat16 32x8x128 bias"


def test_matrices_of_another_type_have_other_names() -> None:
    """Logits are float32, whatever the matrix is."""
    shape = MatmulShape(48, 32, STORE, torch.float32)
    assert name_of(shape, torch.bfloat16) == shape.key == "48x32 store float32"
    assert name_of(shape, torch.float16) == "48x32 store float32 of float16"


def test_float16_is_timed_beside_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused matmuls of gate and up have the matrices' type, too."""
    path, asked = tmp_path / "matmuls.json", []

    def made(missing: Mapping[MatmulShape, Sequence[torch.Tensor]], *_: object) -> dict[MatmulShape, Choices]:
        asked.append({shape: matrices[0].dtype for shape, matrices in missing.items()})
        return dict.fromkeys(missing, by_rows(r4=SKINNY))

    monkeypatch.setattr(matmul_timing, "_machine", lambda device: "machine")
    monkeypatch.setattr(matmul_timing, "device_limits", lambda device: Device())
    monkeypatch.setattr(matmul_timing, "_is_timed", lambda matrices: True)
    monkeypatch.setattr(matmul_timing, "choose", made)
    for dtype in (torch.bfloat16, torch.float16, torch.float16):
        gate_up, logits = MatmulShape(64, 32, GATE_UP, dtype), MatmulShape(48, 32, STORE, torch.float32)
        table = timed_table({shape: [torch.zeros(*shape[:2], dtype=dtype)] for shape in (gate_up, logits)}, path)
        plain = MatmulShape(64, 32, STORE, dtype)
        assert all(table.choice(shape, 3) == SKINNY for shape in (gate_up, logits, plain))
    assert [set(shapes.values()) for shapes in asked] == [{torch.bfloat16}, {torch.float16}]
    assert set(read_choices(path, "machine")) == {
        "64x32 gate_up bfloat16",
        "64x32 store bfloat16",
        "48x32 store float32",
        "64x32 gate_up float16 of float16",
        "64x32 store float16 of float16",
        "48x32 store float32 of float16",
    }


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_timing, "graph_microseconds", None)
    shape = MatmulShape(4096, 128, STORE)
    table = timed_table({shape: [torch.zeros(4096, 128, dtype=torch.bfloat16)]}, tmp_path / "table.json")
    assert not any(table.choice(shape, rows) for rows in range(1, 129)) and not list(tmp_path.iterdir())


def test_choices_are_kept_by_machine(tmp_path: Path) -> None:
    path = tmp_path / "made" / "table.json"
    first, second = by_rows(r4=SKINNY), by_rows(r1=SkinnyConfig(128, 256, 1, 4, 8))
    assert read_choices(path, "a") == {}
    write_choices(path, "a", {"shape": first})
    write_choices(path, "b", {"shape": second})
    assert read_choices(path, "a") == {"shape": first}
    assert read_choices(path, "b") == {"shape": second}
    assert read_choices(path, "c") == {}
    assert [entry.name for entry in path.parent.iterdir()] == ["table.json"]


def test_two_do_not_time_at_once(tmp_path: Path) -> None:
    """Another process would wait for the lock; the test asks for it without waiting."""
    path = tmp_path / "cache" / "matmuls.json"
    with alone(path), path.with_name("matmuls.json.lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.with_name("matmuls.json.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_another_has_written_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process writes between this one's look at the file and its lock."""
    path = tmp_path / "matmuls.json"
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    mine, others = MatmulShape(64, 64, STORE), MatmulShape(32, 64, STORE)

    @contextlib.contextmanager
    def after_another(file: Path) -> Iterator[None]:
        write_choices(file, "machine", {others.key: by_rows()})
        yield

    monkeypatch.setattr(matmul_timing, "alone", after_another)
    monkeypatch.setattr(matmul_timing, "_machine", lambda device: "machine")
    monkeypatch.setattr(matmul_timing, "device_limits", lambda device: Device())
    monkeypatch.setattr(matmul_timing, "_is_timed", lambda matrices: True)
    monkeypatch.setattr(matmul_timing, "choose", lambda missing, *rest: dict.fromkeys(missing, by_rows()))
    timed_table({mine: [weight]}, path)
    assert set(read_choices(path, "machine")) == {mine.key, others.key}


def test_choices_for_other_row_counts_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_choices(path, "a", {"shape": {1: SKINNY}, "other": by_rows()})
    assert read_choices(path, "a") == {"other": by_rows()}


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', '{"a": {"shape": [[1, [1, 2]]]}}', '{"a": {"shape": 1}}'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a table of matmuls; delete it"):
        read_choices(path, "a")


def test_the_wide_kernel_is_compiled_for_each_weight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.zeros(256, 64), torch.zeros(512, 64)]
    launched: list[tuple[int, ...]] = []

    def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, programs: int) -> None:
        launched.append((*x.shape, *weight.shape, *out.shape, programs))

    monkeypatch.setattr(matmul_timing, "wide_gate_up", launch)
    assert wide_programs(weights, Device(114, 220_000, is_hopper=False)) == 0 and not launched
    assert wide_programs(weights, Device(114, 220_000, is_hopper=True)) == 114
    assert launched == [(1, 64, 256, 64, 1, 128, 114), (1, 64, 512, 64, 1, 256, 114)]


def test_without_room_for_the_wide_kernel_the_library_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(*_: object) -> None:
        raise triton.runtime.OutOfResources(240_000, 232_448, "shared memory")

    monkeypatch.setattr(matmul_timing, "wide_gate_up", launch)
    assert wide_programs([torch.zeros(256, 64)], Device(132, 220_000, is_hopper=True)) == 0
    assert "gate and up of many rows use PyTorch" in caplog.text


@pytest.mark.gpu
def test_timed_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    path = tmp_path / "table.json"
    weights = {
        shape: [torch.randn(shape.out_features, shape.in_features, device=device).bfloat16() * 0.02]
        for shape in (
            MatmulShape(6144, 4096, STORE),
            MatmulShape(4096, 4096, ADD),
            MatmulShape(28672, 4096, GATE_UP),
            MatmulShape(32000, 4096, STORE, torch.float32),
        )
    }
    first = timed_table(weights, path)
    (tables,) = json.loads(path.read_text()).values()
    assert set(tables) == {shape.key for shape in weights} | {"28672x4096 store bfloat16"}
    monkeypatch.setattr(matmul_timing, "graph_microseconds", None)
    second = timed_table(weights, path)
    for shape, (weight,) in weights.items():
        for rows in (1, 16, 33, 65, 128, 129):
            assert first.choice(shape, rows) == second.choice(shape, rows)
            x = torch.randn(rows, shape.in_features, device=device).bfloat16()
            expected = reference.linear(x.float(), weight.float())
            wide = torch.ones(rows, shape.out_features, device=device, dtype=shape.out_dtype)
            if shape.mode == GATE_UP:
                out = torch.empty(rows, shape.out_features // 2, device=device, dtype=shape.out_dtype)
                second.gate_up(x, weight, wide, out)
                expected = reference.silu_and_multiply(*expected.chunk(2, dim=1))
            else:
                out = wide
                second.matmul(x, weight, out, shape.mode == ADD)
                expected += shape.mode == ADD
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_candidates_are_compiled_at_once_before_they_are_timed(tmp_path: Path) -> None:
    """A process of its own, because in this one kernels may be defined for the interpreter."""
    environment = child_environment() | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compile_candidates"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
