"""What the compiled loops are made of: how they are compiled, and views on the bits of numbers.

Source: numba's documentation of `intrinsic`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _intrinsic

from quant.loop_cache import NoCache, SharedCache

if TYPE_CHECKING:
    from collections.abc import Callable

u16, u32 = np.uint16, np.uint32

# Numba's annotations do not describe what its decorators return.
_njit: Callable[..., Any] = njit
intrinsic: Callable[..., Any] = _intrinsic


def loop(function: Callable[..., Any]) -> Any:
    """Compile once per machine; where no folder can hold the cache, once per process.

    Only Python calls a loop, or a loop: no C function is made of it.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    dispatcher = _njit(**options)(function)
    try:
        dispatcher._cache = SharedCache(function)
    except RuntimeError:
        dispatcher._cache = NoCache(function.__name__)
    return dispatcher


def inline(function: Callable[..., Any]) -> Any:
    """Become a part of every caller, before LLVM sees it.

    A call per segment would cost a third of the speed; `forceinline` would have each helper
    optimised and compiled by itself first, which doubles the time that a first use takes.
    """
    return _njit(inline="always", error_model="numpy")(function)


@intrinsic
def as_float(_context, bits):
    """Return the float32 of these bits (uint32) or of these upper bits (uint16, a bfloat16)."""

    def generate(_context, builder, _signature, arguments):
        word = arguments[0]
        if bits == types.uint16:
            word = builder.shl(builder.zext(word, ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def as_bits(_context, x):
    """Return the bits of a float32."""

    def generate(_context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(x), generate


@intrinsic
def fma(_context, x, y, z):
    """Return x y + z of float32, rounded once: the same on every machine."""

    def generate(_context, builder, _signature, arguments):
        return builder.fma(*arguments)

    return types.float32(x, y, z), generate


@intrinsic
def from_half(_context, bits):
    """Return the float16 of these bits as float32."""

    def generate(_context, builder, _signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(bits), generate


@inline
def copy_into(to, source):
    """Fill a row with another of its length; `to[:] = source` would compile for two seconds."""
    for i in range(np.uint64(to.shape[0])):
        to[i] = source[i]


@inline
def to_bfloat16(x):
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = as_bits(x)
    return u16(u32(u32(bits + u32(0x7FFF)) + u32(u32(bits >> u32(16)) & u32(1))) >> u32(16))
