"""FP8 E4M3 with one scale per 128x128 block or per row: the definition, in plain torch.

    scale = amax(block) / 448        codes = round_to_e4m3(w / scale)        w ~ codes * scale

Source: the 128x128 layout is section 3.3 of the DeepSeek-V3 technical report; E4M3 is that of the
OCP FP8 specification: largest value 448, smallest step 2^-9, no infinity, a signed zero. On disk a
block scale is named `weight_scale_inv`; in spite of the name, codes are multiplied by it.

Three ways to round the scale:

    pow2      up to a power of two, 2^ceil(log2(amax / 448)), stored as bfloat16, exactly. Loaders
              that turn scales into UE8M0 change nothing, where they cost other files 41% more error
    float32   not at all
    bfloat16  to the nearest bfloat16, and the codes are taken from the rounded scale

A scale is never below 2^-126, the smallest normal float32; a block of zeros has scale 1. The trap:
torch saturates in the cast to E4M3 and other libraries return NaN, so codes are clamped beforehand.

`quant.fp8.cpu` does the same, to the byte, at many times the speed.

Shape letters: N rows (outputs), K columns (inputs), R x C grid of blocks; `...` may hold experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from quant.errors import QuantError
from quant.measure import E4M3_MAX, Error, measure

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_SCALE = 2.0**-126
SCALE_DTYPES = {"pow2": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16}


def quantize(
    w_NK: Tensor, block: tuple[int, int], scale_mode: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes, scale) with one scale per block of this size.

    w_NK   [N, K] float; N and K need not be multiples of the block's
    codes  [N, K] float8_e4m3fn, in `out` if given
    scale  [R, C] bfloat16 or float32, never zero

    Raises QuantError if the weight holds a NaN or an infinity: amax would spread it over a block.
    """
    check_finite(w_NK)
    x_NK = w_NK.float()
    scale = round_scale(block_amax(x_NK, block), scale_mode)
    ratio = x_NK / expand(scale.float(), block, x_NK.shape)
    codes = ratio.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes if out is None else out.copy_(codes), scale


def dequantize(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return codes [..., N, K] times scale [..., R, C] in float32, one per block of this size.

    The scale may be of any type that torch widens: bfloat16, float16, float32, E8M0.

    Raises QuantError if its shape is not the grid of these codes.
    """
    check_grid(codes.shape, scale.shape, block)
    return codes.float() * expand(scale.float(), block, codes.shape)


def compare(w: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Error:
    """Return how far codes * scale are from the weight, all [..., N, K]."""
    decoded = dequantize(codes, scale, block)
    return measure(w, decoded, scale=expand(scale.float(), block, codes.shape), codes=codes)


def round_scale(amax: Tensor, mode: str) -> Tensor:
    """Return the scale of blocks with these float32 amax, in the type it is stored in."""
    if mode == "pow2":
        # 448 = 1.75 * 2^8: in float32 bits, a mantissa above 1.75 carries into the exponent.
        exponent = ((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8
        scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    else:
        # by a tensor: by a number, CUDA multiplies with its reciprocal, one ulp off
        scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, scale).to(SCALE_DTYPES[mode])


def block_amax(x_NK: Tensor, block: tuple[int, int]) -> Tensor:
    """Return max |x| of every block, [R, C]."""
    rows, cols = grid_shape(x_NK.shape, block)
    right, below = cols * block[1] - x_NK.shape[1], rows * block[0] - x_NK.shape[0]
    padded = pad(x_NK.abs(), (0, right, 0, below))
    return padded.reshape(rows, block[0], cols, block[1]).amax(dim=(1, 3))


def expand(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return the scale [..., R, C] of every element, [..., N, K]."""
    rows = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[-1]]


def grid_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scale, [..., R, C], of codes [..., N, K]."""
    *experts, num_rows, num_cols = shape
    return (*experts, -(-num_rows // block[0]), -(-num_cols // block[1]))


def check_grid(shape: torch.Size, scale_shape: torch.Size, block: tuple[int, int]) -> None:
    """Raise QuantError if a scale of this shape is not the grid of codes of that shape."""
    expected = grid_shape(shape, block)
    if tuple(scale_shape) != expected:
        raise QuantError(
            f"the scale has shape {list(scale_shape)},\n"
            f"  expected {list(expected)}: one for every {block[0]}x{block[1]} of {list(shape)}"
        )


def check_finite(w_NK: Tensor) -> None:
    """Raise QuantError with the number of NaN and infinite weights and where the first one is."""
    bad = ~w_NK.isfinite()
    if bad.any():
        first = bad.nonzero()[0].tolist()
        raise QuantError(
            f"{int(bad.sum())} of {bad.numel()} weights are NaN or infinite, the first at "
            f"{first},\n"
            "  expected finite ones: a scale would spread the damage over its block"
        )
