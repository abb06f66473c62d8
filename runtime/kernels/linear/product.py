"""Linear layers on stored weights: float, or FP8 E4M3 with scales of 128 x 128 blocks or of rows.

    weight only   y[m, n] = sum_k x[m, k] * codes[n, k] * scale(n, k)          summed in float32
    dynamic       the same on codes(x) * s(x) of quantize_rows, over 128 columns of a token (block
                  scales) or over the whole token (channel scales): W8A8, as vLLM and SGLang do

Source: DeepSeek-V3 technical report, section 3.3.
Trap: codes and scales have to be multiplied in float32 wherever the weight is read anyway: their
product, rounded to bfloat16, is another weight. From 512 rows on a weight-only product does round
it, as loading the weight decoded would: cuBLAS is then twice as fast as tiles that decode.

One row is a product in registers (see gemv). For a few the weights are the left operand of the
tensor cores, where they may come from registers. W8A8 is cuBLAS's where it has it.

Shape letters: M rows of x (tokens), N outputs, K inputs, G groups of 128 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.encode.rows import MULTIPLE, Codes, quantize_rows, quantize_rows_reference
from runtime.kernels.launch import use_triton
from runtime.kernels.linear.row import row_linear
from runtime.kernels.linear.tiles import tile_product
from runtime.kernels.linear.weight import (
    BLOCK,
    Fp8Weight,
    Stored,
    Weight,
    dequant,
    dequant_reference,
    linear_fp8_reference,
    product_reference,
    scale_edge,
    takes_codes,
)

__all__ = [
    "BLOCK",
    "Fp8Weight",
    "Stored",
    "Weight",
    "codes_for",
    "codes_linear",
    "dequant",
    "dequant_reference",
    "linear",
    "linear_codes",
    "linear_fp8",
    "linear_fp8_dynamic",
    "linear_fp8_dynamic_reference",
    "linear_fp8_reference",
    "linear_reference",
    "scale_edge",
    "takes_codes",
]
_DECODED_ROWS = 512


def linear_fp8_dynamic_reference(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Say what `linear_fp8_dynamic` computes, in plain torch."""
    group = x_MK.shape[1] if scale_edge(codes, scale) == 1 else BLOCK
    x_codes, x_scale = quantize_rows_reference(x_MK, group)
    x = x_codes.float() * x_scale.repeat_interleave(group, 1)[:, : x_MK.shape[1]]
    return linear_fp8_reference(x, codes, scale).to(x_MK.dtype)


def linear_reference(x_MK: Tensor, weight: Weight, batch: int | None = None) -> Tensor:
    """Say what `linear` computes, in plain torch.

    batch  the number of rows that decides about quantising x, where x is part of a larger batch
    """
    if isinstance(weight, Fp8Weight) and weight.quantises(batch or x_MK.shape[0]):
        return linear_fp8_dynamic_reference(x_MK, weight.codes, weight.scale)
    return product_reference(x_MK, weight)


def codes_for(weight: object, x_MK: Tensor) -> Codes | None:
    """Return room for the codes of the rows x if `linear` with this weight takes them."""
    num_rows, k = x_MK.shape
    return Codes.room(num_rows, k, x_MK.device) if takes_codes(weight, x_MK) else None


def linear(x: Tensor, weight: Weight, codes: Codes | None = None) -> Tensor:
    """Return x @ weight.T [..., N] in x's dtype, whatever the weight is stored in.

    x       [..., K]
    weight  [N, K] in x's dtype, or an Fp8Weight
    codes   those of x, from room of `codes_for`, if there are any: x is not quantised again
    """
    x_MK = x.reshape(-1, x.shape[-1])
    if x_MK.shape[0] == 1 and use_triton(x):
        y_MN = row_linear(x_MK.contiguous(), weight)
    elif codes is not None and takes_codes(weight, x_MK):
        y_MN = codes_linear(codes, weight, x_MK)
    elif not isinstance(weight, Fp8Weight):
        return F.linear(x, weight)
    else:
        multiply = linear_fp8_dynamic if weight.quantises(x_MK.shape[0]) else linear_fp8
        y_MN = multiply(x_MK, weight.codes, weight.scale)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def linear_fp8(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return x @ (codes * scale).T [M, N] in x's dtype, summed in float32; x is not quantised.

    x_MK           [M, K] float, rows contiguous in themselves
    codes, scale   one weight, as in Fp8Weight
    """
    _check(x_MK, codes, scale)
    if not use_triton(x_MK):
        return linear_fp8_reference(x_MK, codes, scale)
    if x_MK.shape[0] == 1:
        return row_linear(x_MK, Fp8Weight(codes, scale))
    if x_MK.shape[0] >= _DECODED_ROWS and x_MK.dtype in (torch.bfloat16, torch.float16):
        return F.linear(x_MK, dequant(codes, scale, x_MK.dtype))
    return tile_product(x_MK, None, codes, scale, x_MK.dtype)


def linear_fp8_dynamic(x_MK: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return x @ (codes * scale).T [M, N] in x's dtype with x quantised to E4M3 first (W8A8).

    x_MK          [M, K] float, rows contiguous in themselves; one scale for each token and 128
                  columns (block weights) or for each token (channel weights)
    codes, scale  one weight, as in Fp8Weight
    """
    edge = _check(x_MK, codes, scale)
    if not use_triton(x_MK):
        return linear_fp8_dynamic_reference(x_MK, codes, scale)
    group = x_MK.shape[1] if edge == 1 else BLOCK
    x_codes, x_scale = quantize_rows(x_MK, group, MULTIPLE)
    y_MN = linear_codes(x_codes, x_scale, codes, scale, x_MK.dtype)
    return y_MN[: x_MK.shape[0]]


def codes_linear(codes: Codes, weight: Fp8Weight, like: Tensor) -> Tensor:
    """Return what the weight makes of the rows that have these codes, on a GPU.

    like  as many rows as there are, in the dtype of the product
    """
    y_MN = linear_codes(*codes, weight.codes, weight.scale, like.dtype)
    return y_MN[: like.shape[0]]


def linear_codes(
    x_codes: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (x_codes * x_scale) @ (codes * scale).T [M, N], on a GPU.

    x_codes, x_scale  from `quantize_rows`, M a multiple of 16
    codes, scale      one weight, as in Fp8Weight
    """
    if not _cublas_has(x_codes, codes, scale, dtype):
        return tile_product(x_codes, x_scale, codes, scale, dtype)
    y_MN: Tensor = torch._scaled_mm(
        x_codes, codes.T, scale_a=x_scale, scale_b=scale.T, out_dtype=dtype
    )
    return y_MN


def _cublas_has(x_codes: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Return whether cuBLAS multiplies these: in blocks on Hopper only, its scales in fours."""
    (n, k), by_rows = codes.shape, scale.shape[1] == 1
    return (
        x_codes.is_cuda
        and torch.cuda.get_device_capability(x_codes.device) == (9, 0)
        and dtype == torch.bfloat16
        and scale.dtype == torch.float32
        and n % 16 == 0
        and k % (16 if by_rows else 4 * BLOCK) == 0
    )


def _check(x_MK: Tensor, codes: Tensor, scale: Tensor) -> int:
    edge = scale_edge(codes, scale)
    assert x_MK.ndim == codes.ndim == 2, "x and codes must be matrices"
    assert x_MK.shape[1] == codes.shape[1], "x and codes must have the same number of columns"
    assert x_MK.stride(1) == 1, "rows must be contiguous"
    return edge
