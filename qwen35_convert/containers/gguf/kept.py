"""Whether a GGUF file holds what llama.cpp's converter makes of kept rows, bit for bit.

    1 + w of a norm      in float32, rounded once; of an F16 source in F16, as the converter adds it
    -exp(A_log)          the same; exp of one library differs from another's by a few ulp
    all else             cast

A quantised source has two readings: codes times scale in float32, or rounded to its model's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from formats.family.arithmetic import Float32
from formats.family.ops import apply_all, undo
from quant.measure import same_bits, within

if TYPE_CHECKING:
    from torch import Tensor

    from quant.stored import Value

# The largest error of exp in float32 that a library admits is 2.5 ulp (numpy's AVX2).
EXP_SLACK = {"A_log": (0.0, 2.0**-21)}
HALF_SLACK = {"A_log": (0.0, 2.0**-10)}


def holds(ours: Value, theirs: Value, rows: tuple[int, int]) -> bool:
    """Whether rows of a GGUF file are the source's, transformed and cast."""
    role, stored = ours.atom.role, ours.scheme.decode(ours.stored(*rows))
    return any(
        within(stored, made, slack[role])
        if role in slack
        else same_bits(stored, made.to(stored.dtype))
        for made, slack in _made(ours, theirs, rows)
    )


def _made(
    ours: Value, theirs: Value, rows: tuple[int, int]
) -> Iterator[tuple[Tensor, dict[str, tuple[float, float]]]]:
    """Yield what right arithmetic makes of the source's rows, and what it may be off by."""
    import torch

    ops, values = undo(ours.late), theirs.rows(*rows)
    yield apply_all(ops, values), EXP_SLACK
    if theirs.atom.quantized:
        yield apply_all(ops, theirs.exact(*rows)), EXP_SLACK
    if values.dtype == torch.float16:
        narrow = tuple(op for op in ops if op != Float32())
        yield apply_all(narrow, values).half(), HALF_SLACK
