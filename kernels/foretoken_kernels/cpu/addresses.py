"""View memory at an address as an array: compiled passes store array addresses in int64 tables."""

from __future__ import annotations

from typing import Any

from foretoken_kernels.cpu.compile import carray, cgutils, emitted, inlined, ir, types

_FAR = 1 << 48


def _pointer_to(dtype: Any) -> Any:
    def typed(_typing: Any, _address: Any) -> Any:
        def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], _context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(types.int64), codegen

    return emitted(typed)


_float32_pointer = _pointer_to(types.float32)
_uint16_pointer = _pointer_to(types.uint16)
_int32_pointer = _pointer_to(types.int32)
_int64_pointer = _pointer_to(types.int64)
_uint64_pointer = _pointer_to(types.uint64)


@inlined
def float32_at(address: int) -> Any:
    return carray(_float32_pointer(address), _FAR)


@inlined
def uint16_at(address: int) -> Any:
    return carray(_uint16_pointer(address), _FAR)


@inlined
def int32_at(address: int) -> Any:
    return carray(_int32_pointer(address), _FAR)


@inlined
def int64_at(address: int) -> Any:
    return carray(_int64_pointer(address), _FAR)


@inlined
def uint64_at(address: int) -> Any:
    return carray(_uint64_pointer(address), _FAR)


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
