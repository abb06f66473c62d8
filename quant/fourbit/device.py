"""Four and eight bits where the tensors are: what `cpu` does, to the byte, in plain torch.

Codes are returned in the memory of the CPU, which writes them.

Shape letters: B groups of g weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.fourbit.reference import encode_int as whole_numbers
from quant.fp8.reference import check_finite

if TYPE_CHECKING:
    from torch import Tensor

# From an odd code a tie goes up, to the even one.
UP, UP_FROM_TIES = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def grouped(w_NK: Tensor, group: int) -> Tensor:
    """Return the groups of a weight's rows, [B, g]."""
    return w_NK.reshape(-1, group)


def extremes(w_NK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest weight, and 0, of each group, float32 [B].

    QuantError if a weight is not finite.
    """
    w_Bg = grouped(w_NK, group)
    low, high = w_Bg.amin(1), w_Bg.amax(1)
    if not (low.isfinite() & high.isfinite()).all():
        check_finite(w_NK.float())
    return low.float().clamp(max=0), high.float().clamp(min=0)


def encode_e2m1(w_Bg: Tensor, d_B: Tensor) -> Tensor:
    """Return packed codes, uint8 [B, g / 2]."""
    w = w_Bg.float()
    size = w.abs() / d_B[:, None]
    code = w.signbit().byte() * 8
    for tie in UP:
        code += size > tie
    for tie in UP_FROM_TIES:
        code += size >= tie
    return (code[:, ::2] | (code[:, 1::2] << 4)).cpu()


def encode_int(w_Bg: Tensor, d_B: Tensor, zero_B: Tensor, width: int) -> Tensor:
    """Return whole numbers of so many bits, int8 [B, g]."""
    return whole_numbers(w_Bg, d_B, zero_B, width).cpu()
