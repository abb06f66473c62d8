"""Vectors for numba: LANES float32, int32 or truths side by side, written like one.

    x = load(array, at)                      LANES elements from `at` on
    x = gather(array, at, stride)            elements `stride` apart
    +  -  *  /  <  <=  >  ==  &  |  abs      lane by lane, each rounded once: nothing is fused
    choose(mask, a, b)                       a where the mask is true, b elsewhere

A loop over columns with such values for its accumulators does LANES blocks at a time, and adds up
each of them in the order of its columns: sums have the bits of plain loops in C. LLVM cuts a vector
into the machine's registers. Compilers' own vectorising would do the same on a good day; here
nothing depends on what they can prove of aliases and trip counts.

`lane_types` has the type and the operators. Traps: operands must both be vectors of one type
(`splat` makes one of a number); nothing checks that an index is inside its array; indices are
uint64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from quant.ggml.lane_types import FLOATS, INTS, LANES, Lanes, call
from quant.numba_ops import intrinsic

_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _constant(kind: Lanes, number: float) -> Any:
    """Return a vector of one number that is known here."""
    return ir.Constant(kind.vector, [number] * LANES)


def _place(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any) -> Any:
    """Return the address of an element, arguments being its array and index, as of a `kind`."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())


@intrinsic
def splat(_context, x):
    """Return a vector of one number, a float32 or an int32."""
    kind = FLOATS if x == types.float32 else INTS

    def generate(_context, builder, _signature, arguments):
        vector, first = ir.Constant(kind.vector, ir.Undefined), ir.IntType(32)(0)
        vector = builder.insert_element(vector, arguments[0], first)
        order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(vector, vector, order)

    return kind(x), generate


@intrinsic
def load(_context, array, at):
    """Return LANES elements of a float32 or int32 array."""
    kind = FLOATS if array.dtype == types.float32 else INTS

    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature, arguments, kind.vector)
        return builder.load(place, align=4)

    return kind(array, at), generate


@intrinsic
def gather(_context, array, at, stride):
    """Return LANES elements of a float32 array that are `stride` apart."""

    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature, arguments, ir.FloatType())
        vector = ir.Constant(FLOATS.vector, ir.Undefined)
        for lane in range(LANES):
            x = builder.load(place, align=4)
            vector = builder.insert_element(vector, x, ir.IntType(32)(lane))
            place = builder.gep(place, [arguments[2]])
        return vector

    return FLOATS(array, at, stride), generate


@intrinsic
def store(_context, array, at, x):
    """Write LANES elements of an array: of its own type, or the low bytes of int32 to uint8."""

    def generate(context, builder, signature, arguments):
        value = arguments[2]
        if array.dtype == types.uint8:
            value = builder.trunc(value, _BYTES)
        place = _place(context, builder, signature, arguments, value.type)
        builder.store(value, place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, at, x), generate


@intrinsic
def choose(_context, mask, a, b):
    """Return a where the mask is true, b elsewhere."""

    def generate(_context, builder, _signature, arguments):
        return builder.select(*arguments)

    return a(mask, a, b), generate


@intrinsic
def everywhere(_context, mask):
    """Return whether the mask is true in all lanes."""

    def generate(_context, builder, _signature, arguments):
        word = ir.IntType(LANES)
        return builder.icmp_unsigned("==", builder.bitcast(arguments[0], word), word(2**LANES - 1))

    return types.boolean(mask), generate


@intrinsic
def lowest(_context, x):
    """Return the bits of the least of LANES float32 that are not negative; NaN is above all."""

    def generate(_context, builder, _signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [INTS.vector])
        name = f"llvm.vector.reduce.umin.v{LANES}i32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [builder.bitcast(arguments[0], INTS.vector)])

    return types.uint32(x), generate


@intrinsic
def first(_context, mask):
    """Return the first lane where the mask is true, LANES if it is nowhere."""

    def generate(_context, builder, _signature, arguments):
        word = builder.bitcast(arguments[0], ir.IntType(LANES))
        count = builder.cttz(word, ir.IntType(1)(0))
        return builder.zext(count, ir.IntType(64))

    return types.uint64(mask), generate


@intrinsic
def root(_context, x):
    """Return square roots."""

    def generate(_context, builder, _signature, arguments):
        return call(builder, "sqrt", arguments[0])

    return x(x), generate


@intrinsic
def whole(_context, x):
    """Return the nearest whole numbers, ties to even."""

    def generate(_context, builder, _signature, arguments):
        return call(builder, "rint", arguments[0])

    return x(x), generate


@intrinsic
def bits(_context, x):
    """Return the bits of float32 as int32."""

    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], INTS.vector)

    return INTS(x), generate


@intrinsic
def floats(_context, x):
    """Return int32 as float32."""

    def generate(_context, builder, _signature, arguments):
        return builder.sitofp(arguments[0], FLOATS.vector)

    return FLOATS(x), generate


@intrinsic
def nearest(_context, x):
    """Return the nearest int32, ties to even; beyond 2^22 what ggml's bit trick makes of it."""

    def generate(_context, builder, _signature, arguments):
        shifted = builder.fadd(arguments[0], _constant(FLOATS, 12582912.0))
        low = builder.and_(builder.bitcast(shifted, INTS.vector), _constant(INTS, 0x7FFFFF))
        return builder.sub(low, _constant(INTS, 0x400000))

    return INTS(x), generate


@intrinsic
def clamp(_context, x, least, most):
    """Return x between two bounds, the lower one for NaN."""

    def generate(_context, builder, _signature, arguments):
        x, least, most = arguments
        x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
        return builder.select(builder.fcmp_ordered("<", x, most), x, most)

    return x(x, least, most), generate
