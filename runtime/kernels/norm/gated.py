"""The norm of the delta rule's output, head by head, with its gate.

Chosen for: `RULE_OUTPUT` of prompts, as numbers or as codes. Decoding norms within `RULE_STEP`.

    n = cast(o * rsqrt(mean(o^2) + eps))        y = cast(n * w * silu(z))

Source: the Qwen3.5 model code of transformers for the casts.
Trap: `linear_attn.norm` is plain; every other norm of the family is zero-centred (see rms).

A product in FP8 reads codes of the norm, not its numbers: one kernel writes what `quantize_rows` in
groups of 128 makes of the rounded numbers, to the bit, in their place.

Shape letters: T tokens, V value heads, d value head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.cases import GROUP
from runtime.kernels.encode.rows import Codes, quantized
from runtime.kernels.launch import jit, power_of_two, tl, use_triton, widen
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.silu import sigmoid

if TYPE_CHECKING:
    from torch import Tensor

_GATED_TILE = 4096
# 512 tokens of 0.8B: 3.2 us, 4.4 in tiles of 4096
_FEW_NUMBERS, _SMALL_TILE = 1 << 20, 1024


class Gate(NamedTuple):
    """What the delta rule's output goes through: see `gated_rmsnorm`, whose arguments these are."""

    z_TVd: Tensor
    weight_d: Tensor
    eps: float


class Unscaled(NamedTuple):
    """Rows [T, V*d] whose heads are still to be scaled by their norm: gated, but not rounded twice.

        x = y * rsqrt(sum(squares) / d + eps)         of each head;  y = cast(o * w * silu(z))

    y        [T, V*d], contiguous
    squares  [T, V, P] float32, contiguous: parts of the sum of o^2
    """

    y: Tensor
    squares: Tensor
    d: int
    eps: float


def scaled_reference(x: Unscaled) -> Tensor:
    """Return the rows [T, V*d] scaled, in float32 or wider: x as the product after it has it."""
    root_TV1 = torch.rsqrt(x.squares.sum(-1, keepdim=True) / x.d + x.eps)
    y_TVd = widen(x.y).view(*x.squares.shape[:2], x.d)
    return (y_TVd * root_TV1).flatten(1)


def gated_rmsnorm_reference(o_TVd: Tensor, z_TVd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Say what `gated_rmsnorm` computes, in plain torch."""
    o = widen(o_TVd)
    normed = (o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps)).to(o_TVd.dtype)
    return (weight_d * normed * F.silu(widen(z_TVd))).to(o_TVd.dtype)


def gated_rmsnorm(o_TVd: Tensor, z_TVd: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each value head, times w, times silu(z): norm before gate.

    o_TVd, z_TVd  [T, V, d] of one dtype, heads contiguous; tokens may have any stride
    weight_d      [d] plain factor (not 1 + w), in o's dtype or float32; one vector for all heads
    """
    _check_heads(o_TVd, z_TVd, weight_d)
    if not use_triton(o_TVd):
        return gated_rmsnorm_reference(o_TVd, z_TVd, weight_d, eps)
    (num_tokens, num_heads, d), block = o_TVd.shape, power_of_two(o_TVd.shape[2])
    y = torch.empty(o_TVd.shape, dtype=o_TVd.dtype, device=o_TVd.device)
    tile = _SMALL_TILE if o_TVd.numel() <= _FEW_NUMBERS else _GATED_TILE
    rows = max(1, min(tile // block, power_of_two(num_tokens)))
    _gated_rmsnorm_kernel[(-(-num_tokens // rows), num_heads)](
        o_TVd,
        z_TVd,
        weight_d,
        y,
        num_tokens,
        o_TVd.stride(0),
        z_TVd.stride(0),
        y.stride(0),
        eps,
        D=d,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **early(),
    )
    return y


def gated_rmsnorm_codes(o_TVd: Tensor, z_TVd: Tensor, weight_d: Tensor, eps: float) -> Codes:
    """Return `quantize_rows` of `gated_rmsnorm` as rows [T, V*128], rows in sixteens, on a GPU.

    o_TVd, z_TVd, weight_d  as `gated_rmsnorm` takes them; d is 128, so that a head is a group
    """
    _check_heads(o_TVd, z_TVd, weight_d)
    num_tokens, num_heads, d = o_TVd.shape
    assert d == GROUP, "a head must be a group of codes"
    codes, rows = Codes.room(num_tokens, num_heads * d, o_TVd.device), _GATED_TILE // d
    _gated_codes_kernel[(-(-num_tokens // rows), num_heads)](
        o_TVd,
        z_TVd,
        weight_d,
        *codes,
        codes.scale.stride(1),
        num_tokens,
        o_TVd.stride(0),
        z_TVd.stride(0),
        codes.codes.stride(0),
        eps,
        D=d,
        ROWS=rows,
        num_warps=8,
        **early(),
    )
    return codes


def _check_heads(o_TVd: Tensor, z_TVd: Tensor, weight_d: Tensor) -> None:
    d = o_TVd.shape[2]
    for name, x in (("o", o_TVd), ("z", z_TVd)):
        assert x.stride(2) == 1, f"{name} must have contiguous heads"
        assert x.stride(1) == d, f"{name}'s heads must follow one another"
    assert o_TVd.shape == z_TVd.shape, "o and z must have one shape"
    assert weight_d.shape == (d,), "one factor for each element of a head"
    assert weight_d.dtype in (o_TVd.dtype, torch.float32), "weight must be in o's dtype or float32"


@jit
def gated_norm(o, z, w, root, weight, y):
    """Return the gated norm in float32; root is rsqrt(mean(o^2) + eps).

    weight, y  pointers to the dtypes that the steps are rounded to
    """
    normed = (o * root).to(y.dtype.element_ty).to(tl.float32)
    # the product keeps the wider of the two dtypes, as in torch
    scaled = (normed * w).to(weight.dtype.element_ty).to(tl.float32)
    return scaled * (z * sigmoid(z))


@jit
def _gated_tile(o, z, weight, t, i, column, inside, o_row, z_row, eps, D: tl.constexpr):
    """Return the gated norm of one head of the tokens t [T, 1], rounded to o's dtype."""
    o_Td = tl.load(o + t * o_row + column, mask=inside, other=0.0).to(tl.float32)
    z_Td = tl.load(z + t * z_row + column, mask=inside, other=0.0).to(tl.float32)
    w_d = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    root_T = tl.rsqrt(tl.sum(o_Td * o_Td, 1) / D + eps)
    return gated_norm(o_Td, z_Td, w_d, root_T[:, None], weight, o).to(o.dtype.element_ty)


@jit
def _gated_rmsnorm_kernel(
    o,
    z,
    weight,
    y,
    T,
    o_row,
    z_row,
    y_row,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    column = tl.program_id(1) * D + i
    inside = (t < T) & (i < D)
    y_Td = _gated_tile(o, z, weight, t, i, column, inside, o_row, z_row, eps, D)
    tl.store(y + t * y_row + column, y_Td, mask=inside)


@jit
def _gated_codes_kernel(
    o,
    z,
    weight,
    codes,
    scale,
    height,
    T,
    o_row,
    z_row,
    codes_row,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    start_next()
    wait_for_inputs()
    t_T = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, i = t_T[:, None], tl.arange(0, D)[None, :]
    column = tl.program_id(1) * D + i
    y_Td = _gated_tile(o, z, weight, t, i, column, t < T, o_row, z_row, eps, D)
    q_Td, s_T = quantized(y_Td.to(tl.float32), codes)
    tl.store(codes + t * codes_row + column, q_Td, mask=t < T)
    tl.store(scale + tl.program_id(1).to(tl.int64) * height + t_T, s_T, mask=t_T < T)
