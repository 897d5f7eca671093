"""The environment of child processes that run the code of this clone."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def child_environment() -> dict[str, str]:
    """Return this process's environment of now, with the clone's packages and without proxies."""
    inherited = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
