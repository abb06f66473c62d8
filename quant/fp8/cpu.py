"""FP8 on the CPU: `reference` again, to the byte, by the loops of `loops` and `differences`.

One core reads bfloat16 at several GB/s; README and benchmarks have the figures. These calls release
the interpreter's lock while they work, so threads of the caller's run side by side.

Shape letters: N rows, K columns, R x C grid of blocks; `...` may hold experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from numpy import int64, uint64, zeros

from quant.fp8 import differences, loops
from quant.fp8 import reference as fp8
from quant.measure import Error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

MODES = {"float32": loops.FLOAT32, "bfloat16": loops.BFLOAT16, "pow2": loops.POW2}
UNSIGNED = {
    torch.float8_e4m3fn: torch.uint8,
    torch.bfloat16: torch.uint16,
    torch.float32: torch.uint32,
}


def quantize(
    w_NK: Tensor, block: tuple[int, int], scale_mode: str, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes [N, K], in `out` if given, scale [R, C]): `fp8.quantize`."""
    codes = torch.empty(w_NK.shape, dtype=torch.float8_e4m3fn) if out is None else out
    assert codes.shape == w_NK.shape, f"codes {codes.shape} for a weight {w_NK.shape}"
    assert codes.is_contiguous(), "codes would be written to a copy"
    scale = torch.empty(fp8.grid_shape(w_NK.shape, block))
    rows, cols = unsigned(block, w_NK.shape)
    mode = MODES[scale_mode]
    if not loops.quantize(bits(w_NK), rows, cols, mode, bits(codes), scale.numpy()):
        fp8.check_finite(w_NK.float())
    return codes, scale.to(fp8.SCALE_DTYPES[scale_mode])


def dequantize(
    codes: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return codes [..., N, K] * scale [..., R, C] in float32, `fp8.dequantize`, or in bfloat16."""
    fp8.check_grid(codes.shape, scale.shape, block)
    out = torch.empty(codes.shape, dtype=dtype)
    rows, cols = unsigned(block, codes.shape)
    for codes_NK, scale_RC, out_NK in zip(*map(_matrices, (codes, scale, out)), strict=True):
        loops.dequantize(bits(codes_NK), _floats(scale_RC), rows, cols, bits(out_NK))
    return out


def compare(w: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Error:
    """Return how far codes * scale are from the weight, all [..., N, K]: `fp8.compare`."""
    fp8.check_grid(codes.shape, scale.shape, block)
    total = Error()
    for w_NK, codes_NK, scale_RC in zip(*map(_matrices, (w, codes, scale)), strict=True):
        total += _compare_matrix(w_NK, codes_NK, scale_RC, block)
    return total


def _compare_matrix(w: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Error:
    sums, counts = zeros(4), zeros(4, int64)
    rows, cols = unsigned(block, w.shape)
    if not differences.compare(bits(w), bits(codes), _floats(scale), rows, cols, sums, counts):
        return fp8.compare(w, codes, scale, block)
    square_error, square, square_q, largest = map(float, sums)
    saturated, num_zeros, zero_rows, outside = map(int, counts)
    return Error(
        sum_sq_error=square_error,
        sum_sq=square,
        sum_dot=(square + square_q - square_error) / 2,
        sum_sq_q=square_q,
        max_abs=largest,
        saturated=saturated,
        zeros=num_zeros,
        zero_rows=zero_rows,
        outside=outside,
        count=w.numel(),
    )


def unsigned(block: tuple[int, int], shape: torch.Size) -> tuple[uint64, uint64]:
    """Return a block's rows and columns in the loops' type."""
    whole_segments = block[1] % int(loops.LANES) == 0 or block[1] >= shape[-1]
    assert whole_segments, f"a segment would have two scales: {block[1]} columns to a block"
    return uint64(block[0]), uint64(block[1])


def _matrices(x: Tensor) -> Tensor:
    """Return [E, N, K] of [..., N, K]."""
    return x.reshape(-1, *x.shape[-2:])


def _floats(scale: Tensor) -> NDArray[Any]:
    """Return a scale of any type in float32."""
    floats: NDArray[Any] = scale.float().contiguous().numpy()
    return floats


def bits(x: Tensor) -> NDArray[Any]:
    """Return the bits as unsigned integers, float32's for types that no loop knows (float16)."""
    unsigned = UNSIGNED.get(x.dtype)
    x = x.float() if unsigned is None else x
    words: NDArray[Any] = x.detach().contiguous().view(unsigned or torch.uint32).numpy()
    return words
