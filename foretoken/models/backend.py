"""The choice of a model's kernels and device."""

from __future__ import annotations

import logging
import os
from typing import Literal, NamedTuple

import torch

from foretoken.errors import ConfigError, PreconditionError

DeviceName = Literal["auto", "cpu", "cuda"]
_log = logging.getLogger(__name__)

# Tensor cores with bfloat16 and float16, which the GPU kernels are written for.
_MIN_CAPABILITY = (8, 0)
# Stands for a GPU's UUID where GPU kernels run on CPU tensors.
_INTERPRETER = "cpu"


class Backend(NamedTuple):
    """Kernels and device of a model.

    Tests run GPU kernels on CPU tensors, in Triton's interpreter.
    """

    kernels: Literal["cpu", "gpu"]
    device: torch.device


CPU = Backend("cpu", torch.device("cpu"))


def choose_backend(wanted: DeviceName) -> Backend:
    """Return the backend for ``--device``.

    ``auto`` is the first NVIDIA GPU that can run the kernels, or the CPU.

    Raises:
        ConfigError: the device is ``cuda`` and there is no such GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not os.path.exists("/dev/nvidiactl")):
        return CPU
    problem = _gpu_problem() if os.path.exists("/dev/nvidiactl") else "there is no NVIDIA GPU here, or no driver for it"
    if problem is None:
        return Backend("gpu", torch.device("cuda", torch.cuda.current_device()))
    if wanted == "auto":
        _log.warning("models run on the CPU although an NVIDIA driver is installed: %s", problem)
        return CPU
    raise ConfigError(f"--device cuda: {problem}")


def device_name(backend: Backend) -> str:
    """Return the GPU's name or "CPU", for display."""
    return torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "CPU"


def device_uuid(backend: Backend) -> str:
    """Return a name by which two processes recognize that they share one GPU.

    It is empty without GPU kernels.

    Where GPU kernels run on CPU tensors, all processes of the host share one device.
    """
    if backend.kernels == "cpu":
        return ""
    if backend.device.type == "cpu":
        return _INTERPRETER
    return str(torch.cuda.get_device_properties(backend.device).uuid)


def device_of(uuid: str) -> torch.device:
    """Return the device that ``device_uuid`` named.

    Raises PreconditionError if this process does not see it.
    """
    if uuid == _INTERPRETER:
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise PreconditionError(f"there is no GPU {uuid} here")


def _gpu_problem() -> str | None:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build for CPUs: install one for CUDA (with make: remove .venv first)"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU that it can use: is the driver too old for it?"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 or later is needed"
    return None
