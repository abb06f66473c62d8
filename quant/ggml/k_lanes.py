"""Vectors for numba: LANES float32, int32 or truths side by side, written like one.

    x = load(array, at)                      LANES elements from `at` on
    x = gather(array, at, stride)            elements `stride` apart
    +  -  *  /  <  <=  >  ==  &  |  abs      lane by lane, each rounded once: nothing is fused
    choose(mask, a, b)                       a where the mask is true, b elsewhere

A loop over columns with such values for its accumulators does LANES blocks at a time, and adds up
each of them in the order of its columns: sums have the bits of plain loops in C. LLVM cuts a vector
into the machine's registers. Compilers' own vectorising would do the same on a good day; here
nothing depends on what they can prove of aliases and trip counts.

Traps: operands must both be vectors of one type (`splat` makes one of a number); nothing checks
that an index is inside its array; indices are uint64.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable

from quant.numba_ops import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

i32, f32 = np.int32, np.float32

# One AVX-512 register, two of AVX2, four of NEON.
LANES = 16

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_type_callable: Callable[..., Any] = type_callable
_lower_builtin: Callable[..., Any] = lower_builtin


class Lanes(types.Type):
    """Numba's name for a vector; `element` is what LLVM calls one lane."""

    def __init__(self, name: str, element: Any) -> None:
        super().__init__(name=f"{name}x{LANES}")
        self.vector = ir.VectorType(element, LANES)


FLOATS = Lanes("float32", ir.FloatType())
INTS = Lanes("int32", ir.IntType(32))
MASK = Lanes("bool", ir.IntType(1))


class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.vector)


register_model(Lanes)(_Model)

# What LLVM calls an operator, by the type of its operands.
_SAME = {
    operator.add: {FLOATS: "fadd", INTS: "add"},
    operator.sub: {FLOATS: "fsub", INTS: "sub"},
    operator.mul: {FLOATS: "fmul", INTS: "mul"},
    operator.truediv: {FLOATS: "fdiv"},
    operator.and_: {INTS: "and_", MASK: "and_"},
    operator.or_: {INTS: "or_", MASK: "or_"},
    operator.lshift: {INTS: "shl"},
    operator.rshift: {INTS: "ashr"},
}
_COMPARED = {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.eq: "==",
    operator.ne: "!=",
}


def _define(function: Any, result: Callable[[Lanes], Lanes | None], generate: Any) -> None:
    """Give Python's operator a type and code for two vectors of one type."""

    @_type_callable(function)
    def _(_context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            return result(a) if isinstance(a, Lanes) and a is b else None

        return typer

    _lower_builtin(function, Lanes, Lanes)(generate)


def _define_same(function: Any, names: dict[Lanes, str]) -> None:
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, names[signature.args[0]])(*arguments)

    _define(function, lambda kind: kind if kind in names else None, generate)


def _define_compared(function: Any, sign: str) -> None:
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] is INTS:
            return builder.icmp_signed(sign, *arguments)
        unordered = sign == "!="
        return (builder.fcmp_unordered if unordered else builder.fcmp_ordered)(sign, *arguments)

    _define(function, lambda kind: None if kind is MASK else MASK, generate)


for _function, _names in _SAME.items():
    _define_same(_function, _names)
for _function, _sign in _COMPARED.items():
    _define_compared(_function, _sign)


@_type_callable(abs)
def _type_abs(_context: Any) -> Any:
    def typer(x: Any) -> Any:
        return FLOATS if x is FLOATS else None

    return typer


@_lower_builtin(abs, Lanes)
def _lower_abs(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return _call(builder, "fabs", arguments[0])


def _call(builder: Any, name: str, x: Any) -> Any:
    """Call LLVM's function of one vector."""
    kind = ir.FunctionType(x.type, [x.type])
    name = f"llvm.{name}.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


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
        return _call(builder, "sqrt", arguments[0])

    return x(x), generate


@intrinsic
def whole(_context, x):
    """Return the nearest whole numbers, ties to even."""

    def generate(_context, builder, _signature, arguments):
        return _call(builder, "rint", arguments[0])

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
