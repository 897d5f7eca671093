"""The build of PyTorch, held against the NVIDIA driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from foretoken.doctor.finding import Finding, fault, ok, warning

_NAME = "PyTorch"


@dataclass(frozen=True)
class TorchBuild:
    """``cuda``: the CUDA version that it was built for, such as "12.8"; empty for a CPU build."""

    version: str
    cuda: str
    # Whether it finds a GPU that it can use.
    has_gpu: bool


def check_torch(build: TorchBuild | None, driver: str, device: str) -> Finding:
    """Judge a build.

    Args:
        build: None: PyTorch cannot be imported.
        driver: the latest CUDA version that the driver runs, such as "12.8"; empty: no driver.
        device: as ``--device``: auto, cpu or cuda.
    """
    if build is None:
        return fault(_NAME, "cannot be imported", "pip install 'torch>=2.11'")
    found = f"{build.version}, built for {f'CUDA {build.cuda}' if build.cuda else 'CPUs'}"
    found += f"; the driver runs CUDA {driver}" if driver else "; no NVIDIA driver"
    if device == "cpu" or (device == "auto" and not driver):
        return ok(_NAME, f"{found}: models run on the CPU")
    problem = _problem(build, driver)
    if not problem:
        return ok(_NAME, found)
    return fault(_NAME, found, problem) if device == "cuda" else warning(_NAME, f"{found}; the CPU is used", problem)


def _problem(build: TorchBuild, driver: str) -> str:
    """Return what to do before models run on a GPU; empty: nothing."""
    if not driver:
        return "install NVIDIA's driver, or start the container with --gpus all"
    if not build.cuda:
        return "install PyTorch's CUDA build (with make: remove .venv first)"
    # Within a major version of CUDA, older drivers run newer builds.
    if _major(driver) < _major(build.cuda):
        return f"update the driver to one for CUDA {_major(build.cuda)}, or install a PyTorch built for CUDA {driver}"
    if not build.has_gpu:
        return "PyTorch finds no GPU: look at CUDA_VISIBLE_DEVICES and at nvidia-smi"
    return ""


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def read_build() -> TorchBuild | None:
    """Import PyTorch, which takes a second, and return what it is."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of the build is missing.
        return None
    return TorchBuild(str(torch.__version__), torch.version.cuda or "", torch.cuda.is_available())


def read_driver() -> str:
    """Return the latest CUDA version that the NVIDIA driver runs; empty if there is no driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
