"""Which kernels run a model, and where its tensors lie."""

from __future__ import annotations

import logging
import os
from typing import Literal, NamedTuple

import torch

from foretoken.errors import ConfigError, PreconditionError

DeviceName = Literal["auto", "cpu", "cuda"]
_log = logging.getLogger(__name__)

# Tensor cores with bfloat16, which the GPU kernels are written for.
_MIN_CAPABILITY = (8, 0)
# In the place of a GPU's UUID.
_INTERPRETER = "cpu"


class Backend(NamedTuple):
    """``kernels`` and ``device`` are two things: tests run GPU kernels on CPU tensors, in Triton's interpreter."""

    kernels: Literal["cpu", "gpu"]
    device: torch.device


CPU = Backend("cpu", torch.device("cpu"))


def choose_backend(wanted: DeviceName) -> Backend:
    """``auto`` is the first NVIDIA GPU that the kernels run on, else the CPU.

    Raises:
        ConfigError: ``cuda``, and there is no such GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not os.path.exists("/dev/nvidiactl")):
        return CPU
    problem = _gpu_problem() if os.path.exists("/dev/nvidiactl") else "there is no NVIDIA GPU here, or no driver for it"
    if problem is None:
        return Backend("gpu", torch.device("cuda", torch.cuda.current_device()))
    if wanted == "auto":
        _log.warning("there is an NVIDIA driver here, but models run on the CPU: %s", problem)
        return CPU
    raise ConfigError(f"--device cuda: {problem}")


def device_name(backend: Backend) -> str:
    """For people: CPU, or the GPU's name."""
    return torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "CPU"


def device_uuid(backend: Backend) -> str:
    """By which two processes know that they run on one GPU; empty without GPU kernels, which alone share its memory.

    Where GPU kernels run on CPU tensors, all processes of the host are on one device.
    """
    if backend.kernels == "cpu":
        return ""
    if backend.device.type == "cpu":
        return _INTERPRETER
    return str(torch.cuda.get_device_properties(backend.device).uuid)


def device_of(uuid: str) -> torch.device:
    """The device by ``device_uuid``'s name for it. Raises PreconditionError if this process does not see it."""
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


def default_dtype(backend: Backend) -> torch.dtype:
    """What ``--dtype auto`` means."""
    return torch.float32 if backend.kernels == "cpu" else torch.bfloat16
