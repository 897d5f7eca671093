"""Operations on sixteen float32 lanes inside numba functions: every sum's order is written down.

A compiler that vectorises a reduction chooses its order. Here each operation is one LLVM
instruction on ``<16 x float>``, which gives the same result on every CPU (narrower machines split
it). Sums of products use ``fma``, which rounds once. Only ``reduce_add``, ``reduce_max`` and
``sum_rows`` combine lanes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from numba.extending import models, register_model

from foretoken_kernels.cpu.compile import cgutils, cpu_has, emitted, ir, types

LANES = 16
# Vectors that fit in this CPU's registers. AVX-512: 32 registers of 16 lanes hold 32. AVX2 (16 of 8
# lanes) and ARM (32 of 4 lanes) hold 8.
REGISTERS = 32 if cpu_has("avx512f") else 8

# Whether this CPU has instructions that convert float16. Otherwise LLVM would call a library.
HAS_FLOAT16 = platform.machine() != "x86_64" or cpu_has("f16c")

_F32 = ir.FloatType()
_F16 = ir.HalfType()
_I32 = ir.IntType(32)
_VECTOR = ir.VectorType(_F32, LANES)
_IVECTOR = ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_F16_VECTOR = ir.VectorType(_F16, LANES)


class F32x16Type(types.Type):  # type: ignore[misc]
    """The numba type of one vector; it lives in registers and cannot leave compiled code."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16 = F32x16Type()


@register_model(F32x16Type)
class F32x16Model(models.PrimitiveModel):
    """Numba's representation of the type: one LLVM vector."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        parent: Any = super()
        parent.__init__(dmm, fe_type, _VECTOR)


def _is_flat(array_type: Any, *dtypes: Any) -> bool:
    return isinstance(array_type, types.Array) and array_type.ndim == 1 and array_type.dtype in dtypes


@emitted
def load(_typing: Any, array: Any, index: Any) -> Any:
    """Load ``array[index : index + 16]`` of a flat array, unchecked.

    uint16 means bfloat16 bits, int16 means float16 bits.
    """
    if not _is_flat(array, types.float32, types.uint16, types.int16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, data_pointer(context, builder, signature.args[0], args[0]), args[1])

    return f32x16(array, types.intp), codegen


def data_pointer(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Return the address of an array's elements; ``half *`` for int16, which means float16."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    return builder.bitcast(data, _F16.as_pointer()) if array_type.dtype == types.int16 else data


def emit_plus(builder: Any, start: Any, offset: int) -> Any:
    return builder.add(start, ir.Constant(start.type, offset))


def emit_row_starts(builder: Any, start: Any, stride: Any, num_rows: int) -> list[Any]:
    """Emit the starts of rows that are ``stride`` apart."""
    return [builder.add(start, builder.mul(stride, ir.Constant(stride.type, row))) for row in range(num_rows)]


def emit_load(builder: Any, data: Any, index: Any) -> Any:
    element = builder.gep(data, [index])
    if data.type.pointee == _F32:
        return builder.load(builder.bitcast(element, _VECTOR.as_pointer()), align=4)
    if data.type.pointee == _F16:
        return builder.fpext(builder.load(builder.bitcast(element, _F16_VECTOR.as_pointer()), align=2), _VECTOR)
    bits = builder.zext(builder.load(builder.bitcast(element, _HALVES.as_pointer()), align=2), _IVECTOR)
    return builder.bitcast(builder.shl(bits, _every(16)), _VECTOR)


def _every(number: int) -> Any:
    return ir.Constant(_IVECTOR, [number] * LANES)


@emitted
def store(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Store the lanes to ``array[index : index + 16]``, unchecked.

    uint16 elements get bfloat16 bits, int16 elements float16 bits, rounded with ties to even.
    """
    if not _is_flat(array, types.float32, types.uint16, types.int16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = data_pointer(context, builder, signature.args[0], args[0])
        element = builder.gep(data, [args[1]])
        if data.type.pointee == _F32:
            builder.store(args[2], builder.bitcast(element, _VECTOR.as_pointer()), align=4)
        elif data.type.pointee == _F16:
            rounded = builder.fptrunc(args[2], _F16_VECTOR)
            builder.store(rounded, builder.bitcast(element, _F16_VECTOR.as_pointer()), align=2)
        else:
            builder.store(_bfloat16_bits(builder, args[2]), builder.bitcast(element, _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


def _bfloat16_bits(builder: Any, vector: Any) -> Any:
    bits = builder.bitcast(vector, _IVECTOR)
    odd = builder.and_(builder.lshr(bits, _every(16)), _every(1))
    rounded = builder.lshr(builder.add(builder.add(bits, _every(0x7FFF)), odd), _every(16))
    # Rounding could turn a NaN's payload into an infinity or a zero.
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(is_nan, _every(0x7FC0), rounded), _HALVES)


def emit_splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_IVECTOR, [0] * LANES))


@emitted
def splat(_typing: Any, _scalar: Any) -> Any:
    """Return a vector with the same number in every lane."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0])

    return f32x16(types.float32), codegen


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(_typing: Any, _left: Any, _right: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return emit(builder, args[0], args[1])

        return f32x16(f32x16, f32x16), codegen

    return emitted(typed)


add = _binary(lambda builder, left, right: builder.fadd(left, right))
subtract = _binary(lambda builder, left, right: builder.fsub(left, right))
multiply = _binary(lambda builder, left, right: builder.fmul(left, right))
divide = _binary(lambda builder, left, right: builder.fdiv(left, right))


def _maximum(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _minimum(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


# With a NaN on the left, the result is the right operand.
maximum = _binary(_maximum)
minimum = _binary(_minimum)


def _call(builder: Any, name: str, args: Any) -> Any:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def emit_fma(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", [left, right, addend])


@emitted
def fma(_typing: Any, _left: Any, _right: Any, _addend: Any) -> Any:
    """Return ``left * right + addend`` with one rounding."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return emit_fma(builder, *args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@emitted
def round_even(_typing: Any, _value: Any) -> Any:
    """Round each lane to the nearest whole number, ties to even."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.rint.v16f32", args)

    return f32x16(f32x16), codegen


@emitted
def power_of_two(_typing: Any, _exponent: Any) -> Any:
    """Return 2 to the power of each lane, which must hold a whole number in [-126, 127]."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        exponent = builder.add(builder.fptosi(args[0], _IVECTOR), _every(127))
        return builder.bitcast(builder.shl(exponent, _every(23)), _VECTOR)

    return f32x16(f32x16), codegen


def _reduce(builder: Any, vector: Any, emit: Callable[[Any, Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        lower = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, width), list(range(width))))
        upper = builder.shuffle_vector(
            vector, vector, ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        )
        vector = emit(builder, lower, upper)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@emitted
def reduce_add(_typing: Any, _value: Any) -> Any:
    """Return the sum of the lanes: halves are added to halves, 8 + 8, 4 + 4, 2 + 2, 1 + 1."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], lambda b, lower, upper: b.fadd(lower, upper))

    return types.float32(f32x16), codegen


@emitted
def reduce_max(_typing: Any, _value: Any) -> Any:
    """Return the largest lane."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], _maximum)

    return types.float32(f32x16), codegen


@emitted
def sum_rows(_typing: Any, array: Any, index: Any) -> Any:
    """Return a vector whose lane l is the sum of ``array[index + 16 * l : index + 16 * l + 16]``.

    Neighbours are added first, then pairs, fours and eights.
    """
    if not _is_flat(array, types.float32):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = builder.gep(data_pointer(context, builder, signature.args[0], args[0]), [args[1]])
        vectors = [emit_load(builder, data, ir.Constant(ir.IntType(64), LANES * lane)) for lane in range(LANES)]
        while len(vectors) > 1:
            vectors = [_add_pairs(builder, *vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        return vectors[0]

    return f32x16(array, types.intp), codegen


def _add_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Add neighbouring lanes: ``left``'s sums in the lower half, ``right``'s in the upper half."""
    even = ir.Constant(_IVECTOR, list(range(0, 2 * LANES, 2)))
    odd = ir.Constant(_IVECTOR, list(range(1, 2 * LANES, 2)))
    return builder.fadd(builder.shuffle_vector(left, right, even), builder.shuffle_vector(left, right, odd))


def emit_prefetch(builder: Any, data: Any, index: Any) -> None:
    """Prefetch the cache line of ``data[index]``, which may lie past the end of the memory."""
    byte_pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    # The arguments mean: for reading, into all cache levels, data.
    line = builder.bitcast(builder.gep(data, [index]), byte_pointer)
    builder.call(function, [line, _I32(0), _I32(3), _I32(1)])


def emit_store(builder: Any, data: Any, index: Any, vector: Any) -> None:
    """Store the lanes to the float32 array ``data`` from ``index`` on."""
    builder.store(vector, builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer()), align=4)
