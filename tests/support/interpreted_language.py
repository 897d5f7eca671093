"""Prepares Triton's language for the interpreter faster than Triton does.

Triton replaces the builtins of its language at each call of a device function, and searches all
members of each module again, though the launch has replaced them already. That was a quarter of the
interpreter's time.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_builtins: dict[Any, list[str]] = {}


def patch_builtins(module: Any, *context: Any) -> None:
    """Replace ``interpreter._patch_builtin``: once one builtin is replaced, all are."""
    if module not in _builtins:
        _builtins[module] = [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]
    names = _builtins[module]
    if names and tl.core.is_builtin(getattr(module, names[0])):
        for name in names:
            interpreter._patch_attr(module, name, getattr(module, name), *context)


def install() -> None:
    interpreter._patch_builtin = patch_builtins
