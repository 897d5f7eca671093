"""A start times exactly the matmuls that passes use: others would silently have no choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from foretoken_kernels.gpu import matmul_timing
from foretoken_kernels.gpu.matmul_choice import ADD, GATE_UP, QKV, ROW_BUCKETS, STORE, Choices, MatmulShape, MatmulTable
from foretoken_kernels.gpu.skinny_configs import Device, SkinnyConfig

from foretoken.models.backend import Backend
from foretoken.models.config import load_config
from foretoken.models.device_draft_head import DeviceDraftHead
from foretoken.models.device_sizes import PassSizes
from foretoken.models.draft_head import load_head
from foretoken.models.draft_weights import HeadSource
from foretoken.models.target_weights import load_target_weights
from tests.foretoken.test_device_pass import SIZES, batch, llama, prompt
from tests.references import head_files

TOKENS, BLOCKS = [3, 1, 4], [2, 5]


class Timings:
    """Replaces the clock: counts the matrices of each shape, and chooses PyTorch's matmul."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: dict[MatmulShape, int] = {}
        self.asked: set[MatmulShape] = set()
        ask = MatmulTable.choice

        def asked(table: MatmulTable, shape: MatmulShape, rows: int) -> SkinnyConfig | None:
            self.asked.add(shape)
            return ask(table, shape, rows)

        monkeypatch.setattr(MatmulTable, "choice", asked)
        monkeypatch.setattr(matmul_timing, "_machine", lambda device: "machine")
        monkeypatch.setattr(matmul_timing, "device_limits", lambda device: Device())
        monkeypatch.setattr(matmul_timing, "_is_timed", bool)
        monkeypatch.setattr(matmul_timing, "choose", self.choose)

    def choose(self, weights: Mapping[MatmulShape, Sequence[torch.Tensor]], *_: object) -> dict[MatmulShape, Choices]:
        self.timed = {shape: len(matrices) for shape, matrices in weights.items()}
        return {shape: dict.fromkeys(ROW_BUCKETS) for shape in weights}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", torch.bfloat16), ("qwen2", torch.bfloat16), ("qwen3", torch.bfloat16), ("qwen3", torch.float16)],
)
def test_a_target_asks_for_what_was_timed(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    head_files.random_target(tmp_path, kind)
    model = llama(tmp_path, Backend("gpu", torch.device(device)), SIZES, dtype)
    timings = Timings(monkeypatch)
    model.tune(None)
    # Each shape with all layers' matrices, so that calls in turn find none in the cache.
    of_layers = [shape for shape in timings.timed if shape.mode != STORE]
    assert {shape.mode for shape in of_layers} == {QKV, ADD, GATE_UP}
    assert all(timings.timed[shape] == head_files.NUM_LAYERS for shape in of_layers)
    (heads,) = {shape.heads for shape in timings.timed if shape.mode == QKV}
    assert heads is not None and (heads.has_bias, heads.has_norm) == (kind == "qwen2", kind == "qwen3")
    model.forward(batch([prompt(TOKENS, BLOCKS)], [BLOCKS], [0]))
    assert timings.asked and timings.asked == set(timings.timed)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_a_head_asks_for_what_was_timed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    target, folder = tmp_path / "target", tmp_path / "head"
    if kind == "mtp":
        head_files.mimo_target(target, num_depths=2)
        folder = target
    else:
        head_files.random_target(target)
        head_files.write_folder(folder, *(head_files.eagle_files if kind == "eagle" else head_files.eagle3_files)())
    config, backend = load_config(target), Backend("gpu", torch.device(device))
    shared = load_target_weights(target, config, torch.bfloat16, backend)
    source = HeadSource(folder, config, shared, torch.bfloat16, backend=backend)
    sizes = PassSizes(rows=8, wanted=8, seqs=2, blocks=8)
    head = DeviceDraftHead(load_head(source, num_blocks=8, block_size=4), 32, sizes)
    timings = Timings(monkeypatch)
    head.tune(None)
    rows = batch([prompt(TOKENS, BLOCKS)], [BLOCKS], [0])
    for depth in range(head.num_depths):
        for from_target, width in ((True, head.hidden_width), (False, head.hidden_size)):
            head.forward(rows, np.zeros((len(TOKENS), width), np.float32), from_target=from_target, depth=depth)
    assert timings.asked and timings.asked == set(timings.timed)
