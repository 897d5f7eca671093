"""Make Triton's interpreter faster; kernels compute what they did.

It takes most of the tests' time, and most of its own time goes to what is the same each time or is
thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from triton._utils import validate_block_shape
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
    core.block_type.__init__ = _init_block_type
    core.block_type.name = property(_name_of_block_type)
    core.tensor.__init__ = _init_tensor
    core.tuple.__eq__ = _same_first(core.tuple.__eq__, core.constexpr(True))
    core.dtype.__eq__ = _same_first(core.dtype.__eq__, True)


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


class _Sizes(NamedTuple):
    """What a block type and its tensors say of one shape.

    Attributes:
        shape, num_elements: a type's.
        tensor_shape, numel: a tensor's.
    """

    shape: core.tuple
    num_elements: int
    tensor_shape: core.tuple
    numel: core.constexpr


@functools.cache
def _sizes(shape: tuple[int, ...]) -> _Sizes:
    tensor_shape = core.tuple([core.constexpr(size) for size in shape])
    return _Sizes(core.tuple(shape), validate_block_shape(shape), tensor_shape, core.constexpr(math.prod(shape)))


_SCALAR = _sizes(())


def _init_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    """Do what block_type.__init__ does, with one shape for all types that have it."""
    sizes = _sizes(tuple(size.value if isinstance(size, core.constexpr) else size for size in shape))
    if sizes is _SCALAR:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.sizes = element_ty, sizes
    self.shape, self.numel = sizes.shape, sizes.num_elements


def _name_of_block_type(self: core.block_type) -> str:
    return f"<{self.shape}, {self.element_ty}>"


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """Do what tensor.__init__ does, with one shape for all tensors that have it."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = type.sizes if type.is_block() else _SCALAR
    self.shape, self.numel = sizes.tensor_shape, sizes.numel


def _same_first(equal: Callable[[Any, Any], Any], true: Any) -> Callable[[Any, Any], Any]:
    """Return what compares as ``equal`` does, at once if both are one. ``true``: its answer then."""

    def equal_or_same(self: Any, other: Any) -> Any:
        return true if self is other else equal(self, other)

    return equal_or_same
