"""Make Triton's interpreter faster; kernels compute what they did.

It takes most of the tests' time, and most of its own time goes to what is the same each time or is
thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def make_faster() -> None:
    """Patch the interpreter for the rest of this process."""
    # Sums that leave their type are computed in 64 bits, too, for an assertion that only debug mode
    # checks.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _once_for_each(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_for_each_name(interpreter._get_np_dtype)
    core.tensor.__init__ = _init_tensor


def _once_for_each(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what patches Triton's language for each kernel and device function once.

    The interpreter does it at each call of one, and undoes it after each launch; here nothing else
    uses the language.
    """
    patched = set()

    def patch_once(function: Any) -> Any:
        if function not in patched:
            patch(function)
            patched.add(function)
        return interpreter._LangPatchScope()

    return patch_once


def _once_for_each_name(find: Callable[[core.dtype], Any]) -> Callable[[core.dtype], Any]:
    """Return what finds NumPy's type for each of Triton's element types once. Not all have a hash."""
    found = {}

    def find_once(type: core.dtype) -> Any:
        name = type.scalar.name
        if name not in found:
            found[name] = find(type)
        return found[name]

    return find_once


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """Return a tensor's shape and its number of elements, as kernels read them."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """Do what tensor.__init__ does, with one shape for all tensors that have it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _sizes(type.shape if type.is_block() else ())
