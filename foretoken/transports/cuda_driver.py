"""Calls of the CUDA driver that PyTorch has no words for: loaded with the first one, errors by CUDA's names."""

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
    """The module of the driver's API, ``cuda.bindings.driver``. Raises PreconditionError where it is not installed."""
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise PreconditionError(
            "GPU memory is shared through the package cuda-bindings, which PyTorch's builds for CUDA bring along: "
            f"it is not installed ({error})"
        ) from error


def call(name: str, *arguments: Any) -> Any:
    """The result of the driver's function ``name``, None if it has none.

    Raises:
        PreconditionError: the device or the driver cannot do it at all.
        UnavailableError: any other fault; both with the names of function and error.
    """
    return checked(name, getattr(driver(), name)(*arguments))


def checked(name: str, result: tuple[Any, ...]) -> Any:
    """``call``'s result and errors, of what the function ``name`` returned."""
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
    """Calls in the block are made in PyTorch's context on this GPU, whatever the thread did before.

    They may be made by a thread that is just capturing a graph, of which they become no part.
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
    """By which CUDA and PyTorch number the GPUs that this process sees."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _primary_context(index: int) -> Any:
    """Held for as long as the process lives, as PyTorch does."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))
