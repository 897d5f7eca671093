from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter_svc.model.placement import ModelPlacement
from foretoken.errors import ConfigError
from foretoken.models import element_type as module
from foretoken.models import weight_layout as layouts
from foretoken.models.backend import CPU, Backend
from foretoken.models.element_type import DType, element_type
from foretoken.models.weight_layout import PanelLayout, RowLayout, weight_layout
from tests.references.head_files import random_target

GPU = Backend("gpu", torch.device("cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """Return a target's folder for each type that it may be stored in."""
    made = {dtype: tmp_path_factory.mktemp("target") for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for dtype, folder in made.items():
        random_target(folder).to(dtype).save_pretrained(folder)
    return made


@pytest.mark.parametrize(
    ("stored", "on_gpu"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_auto(folders: dict[torch.dtype, Path], stored: torch.dtype, on_gpu: torch.dtype) -> None:
    assert element_type("auto", CPU, folders[stored]) == torch.float32
    assert element_type("auto", GPU, folders[stored]) == on_gpu
    auto, fixed = (ModelPlacement(GPU, torch.bfloat16, is_auto=is_auto) for is_auto in (True, False))
    assert auto.of_folder(folders[stored]).dtype == on_gpu
    assert fixed.of_folder(folders[stored]) is fixed and fixed.of_stored(stored) is fixed


@pytest.mark.parametrize("backend", [CPU, GPU])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_type_by_name(folders: dict[torch.dtype, Path], dtype: DType, backend: Backend) -> None:
    assert all(element_type(dtype, backend, folder) == getattr(torch, dtype) for folder in folders.values())


def test_a_cpu_without_instructions_for_float16(
    folders: dict[torch.dtype, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses the type by its flag, and widens a float16 checkpoint at the start."""
    for each in (module, layouts):
        monkeypatch.setattr(each, "HAS_FLOAT16", False)
    with pytest.raises(ConfigError, match="--dtype float16: this CPU has no instructions for float16"):
        element_type("float16", CPU, folders[torch.float16])
    assert element_type("float16", GPU, folders[torch.float16]) == torch.float16
    assert weight_layout(CPU, torch.float32, [torch.float16]) == PanelLayout(torch.float32)


def test_matrices_keep_16_bits_on_a_cpu_if_all_have_them() -> None:
    half, narrow, wide = torch.float16, torch.bfloat16, torch.float32
    layouts_by_case = {
        (wide, (half, half)): half,
        (wide, (narrow, narrow)): narrow,
        (wide, (narrow, half)): wide,
        (wide, (wide, half)): wide,
        (half, (narrow, narrow)): half,
        (half, (wide, half)): half,
        (narrow, (half, half)): narrow,
    }
    for (dtype, stored), expected in layouts_by_case.items():
        assert weight_layout(CPU, dtype, stored) == PanelLayout(expected)
        assert weight_layout(GPU, dtype, stored) == RowLayout(GPU.device, dtype)
