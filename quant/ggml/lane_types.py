"""The type of vectors in numba's loops, and Python's operators on them; `lanes` has all else.

    +  -  *  /  <  <=  >  ==  !=  &  |  <<  >>  abs

Each is done lane by lane and rounded once: nothing is fused.

Source: numba's documentation of `type_callable` and `lower_builtin`. Trap: loops do not name what
stands here, so a change of it empties no cache of theirs (`quant.loop_cache`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable

if TYPE_CHECKING:
    from collections.abc import Callable

# One AVX-512 register, two of AVX2, four of NEON.
LANES = 16

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
    return call(builder, "fabs", arguments[0])


def call(builder: Any, name: str, x: Any) -> Any:
    """Call LLVM's function of one vector."""
    kind = ir.FunctionType(x.type, [x.type])
    name = f"llvm.{name}.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])
