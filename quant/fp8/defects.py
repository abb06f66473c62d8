"""What codes and scales show to be wrong by themselves, without the weight they were made of.

An artifact's scale is finite and above 0. A source's scale of 0 may belong to a block of zeros:
some quantisers divide its largest weight, 0, by 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant.errors import RESTORE_SCALE, QuantError

if TYPE_CHECKING:
    from torch import Tensor


def count_wrong_scales(scale: Tensor) -> int:
    """Return how many scales are not finite and positive."""
    scale = scale.float()
    return int((~(scale.isfinite() & (scale > 0))).sum())


def count_nan_codes(codes: Tensor) -> int:
    """Return how many E4M3 codes are NaN."""
    codes = codes.view(torch.int8)
    # the largest code of each sign: two maxima cost a tenth of a comparison with a sum
    there = codes.max() == 0x7F or codes.view(torch.uint8).max() == 0xFF
    return int((codes & 0x7F == 0x7F).sum()) if there else 0


def refuse_lost_codes(codes_NK: Tensor, scale_NG: Tensor, width: int, start: int) -> None:
    """Raise QuantError for a scale not above 0 of codes that are not 0.

    scale_NG  float32, one for `width` columns
    start     which row of the weight the first is
    """
    columns = codes_NK.shape[-1]
    spread = scale_NG.repeat_interleave(width, 1)[:, :columns]
    bad = ((spread <= 0) & (codes_NK.float() != 0)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise QuantError(
            f"the scale of row {start + row}, column {column}",
            f"is {float(spread[row, column]):g}",
            "a number above 0",
            RESTORE_SCALE,
        )
