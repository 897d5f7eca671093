"""Calls of the CUDA driver that PyTorch lacks. The driver's module is loaded at the first call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch

from foretoken.errors import ForetokenError, PreconditionError, UnavailableError


@cache
def driver() -> Any:
    """Return the module ``cuda.bindings.driver``.

    Raises PreconditionError if it is not installed.
    """
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise PreconditionError(
            "sharing GPU memory needs the package cuda-bindings, which comes with PyTorch's CUDA builds: "
            f"it is not installed ({error})"
        ) from error


def call(name: str, *arguments: Any) -> Any:
    """Call the driver's function ``name`` and return its result, None if it has none.

    Raises:
        PreconditionError: the device or the driver does not support it.
        UnavailableError: any other error. Both name the function and CUDA's error.
    """
    return checked(name, getattr(driver(), name)(*arguments))


def checked(name: str, result: tuple[Any, ...]) -> Any:
    """Return the result, or raise the error, in what the driver's function ``name`` returned."""
    status, *values = result
    codes = driver().CUresult
    if status == codes.CUDA_SUCCESS:
        return values[0] if values else None
    kind: type[ForetokenError] = UnavailableError
    if status in (codes.CUDA_ERROR_NOT_SUPPORTED, codes.CUDA_ERROR_NOT_PERMITTED, codes.CUDA_ERROR_INVALID_DEVICE):
        kind = PreconditionError
    raise kind(f"{name}: {getattr(status, 'name', status)}")


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Run the block's driver calls in PyTorch's context on this GPU.

    The thread may have been in another context.

    The thread may be capturing a graph; the calls do not become part of it.
    """
    call("cuCtxPushCurrent", _primary_context(device_index(device)))
    try:
        relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            call("cuThreadExchangeStreamCaptureMode", mode)
    finally:
        call("cuCtxPopCurrent")


def device_index(device: torch.device) -> int:
    """Return the number of a GPU among those that this process sees."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _primary_context(index: int) -> Any:
    """Return the GPU's primary context and keep it for the life of the process, as PyTorch does."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))
