"""View memory at an address as an array: compiled passes store array addresses in int64 tables."""

from __future__ import annotations

from typing import Any

from foretoken_kernels.cpu.compile import carray, cgutils, emitted, inlined, ir, types

_FAR = 1 << 48


def _array_at(dtype: Any) -> Any:
    """Return a compiled function that views memory at an address as an array of ``dtype``."""

    @emitted
    def pointer_to(_typing: Any, _address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), codegen

    @inlined
    def array_at(address: int) -> Any:
        return carray(pointer_to(address), _FAR)

    return array_at


float32_at = _array_at(types.float32)
uint16_at = _array_at(types.uint16)
int16_at = _array_at(types.int16)
int32_at = _array_at(types.int32)
int64_at = _array_at(types.int64)
uint64_at = _array_at(types.uint64)


@emitted
def _pointer_like(_typing: Any, _address: Any, template: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(template.dtype)(types.int64, template), codegen


@inlined
def array_like(address: int, template: Any) -> Any:
    """Return an array at ``address`` with the element type of ``template``."""
    return carray(_pointer_like(address, template), _FAR)


@emitted
def as_int64(_typing: Any, _pointer: Any) -> Any:
    """Cast a callback's ``void *`` to a pointer to int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.voidptr), codegen


@emitted
def call_at(_typing: Any, _function: Any, _argument: Any) -> Any:
    """Call the ``void f(void *)`` at one address with another address as its argument."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t]).as_pointer())
        builder.call(function, [builder.inttoptr(args[1], cgutils.voidptr_t)])

    return types.void(types.int64, types.int64), codegen
