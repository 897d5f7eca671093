"""Choose the device of a training run."""

from __future__ import annotations

import torch

from foretoken.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device ``cpu``, ``cuda`` or ``cuda:N``; ``auto`` is the GPU if there is one.

    Raises ConfigError otherwise.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device: {name!r} is not a device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ConfigError(f"--device: {name!r} is not available; available: {available}")
    return device
