"""Scales of a source that cannot be right: 0 erases its codes, one below 0 turns them around.

A block of zeros may have any scale: some quantisers divide its largest weight, 0, by 448. A small
scale of NVFP4 may have become 0; that of a whole matrix may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from quant.errors import QuantError
from quant.fourbit import parts
from quant.fourbit.nvfp4 import Nvfp4
from quant.fp8.scheme import CODES, SCALE, Fp8
from quant.stored import Value, open_value

if TYPE_CHECKING:
    from torch import Tensor

FIX = "restore the scale, or convert the BF16 checkpoint"


def check_positive(source: Checkpoint, value: Value) -> None:
    """Raise QuantError for a weight whose codes have a scale that is not above 0.

    The place is that in the source, whatever order the rows of `value` are in.
    """
    form = value.scheme
    if isinstance(form, Fp8):
        _check_fp8(source, value, form)
    elif isinstance(form, Nvfp4):
        scale, whole = (value.shared[key].data.float() for key in (parts.SCALE, parts.GLOBAL))
        _refuse("scales", scale[~(scale >= 0)])
        _refuse("global scales", whole[~(whole.isfinite() & (whole > 0))])


def _refuse(what: str, bad: Tensor) -> None:
    if bad.numel():
        got = f"holds {float(bad.flatten()[0]):g}"
        raise QuantError(f"one of {bad.numel()} {what}", got, "numbers above 0", FIX)


def _check_fp8(source: Checkpoint, value: Value, form: Fp8) -> None:
    if not bool((value.shared[SCALE].data.float() <= 0).any()):
        return
    value = open_value(source, value.atom)
    for start, stop in value.chunks(1):
        rows = value.stored(start, stop)
        scale = form.scale_of_rows(rows[SCALE], stop - start)
        width = form.block_cols or rows[CODES].shape[-1]
        spread = scale.repeat_interleave(width, 1)[:, : rows[CODES].shape[-1]]
        bad = ((spread <= 0) & (rows[CODES].float() != 0)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            raise QuantError(
                f"the scale of row {start + row}, column {column}",
                f"is {float(spread[row, column]):g}",
                "a number above 0",
                FIX,
            )
