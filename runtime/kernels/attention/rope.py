"""Rotary position embedding of the first `rd` dimensions of a head, after its norm.

Chosen for: the angles, once for all layers, where they are not made beside the embeddings
(embed.tokens). Step and write rotate with the functions here.

    angle[t, i] = position[t] * theta^(-2i / rd),  i < rd/2          (scaled: see frequencies)
    (x_i, x_{i+rd/2}) -> (x_i cos - x_{i+rd/2} sin,  x_{i+rd/2} cos + x_i sin),  the rest unchanged

Source: Su et al. 2021 (RoFormer); Qwen3.5 rotates a quarter of its head. Angles, cosines and sines
are float32 and cast to the model dtype; the rotation itself rounds to the model dtype twice. Images
and videos have three positions a token (time, height, width): with sections [11, 11, 10] the
frequencies are dealt out in turn, T H W T H W ..., and what is left over is T. Text has three equal
ones, which is plain rope.
Traps: the base of the exponent is the number of rotary dimensions (64), not head_dim (256). Pairs
lie rd/2 apart, not side by side.

Shape letters: T tokens, h heads, d head size, r rd/2 frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.attention.frequencies import attention_factor, frequencies
from runtime.kernels.launch import jit, tl, use_triton
from runtime.kernels.norm.rms import rmsnorm_reference
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from formats.family.rope import Scaling

_ANGLES = 1024


def rope_cos_sin_reference(
    positions: Tensor,
    rd: int,
    theta: float,
    sections: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Say what `rope_cos_sin` computes, in plain torch."""
    frequency_r, axis_r = frequencies(rd, theta, sections, positions.device, scaling)
    position_Tr = positions.expand(3, -1).T[:, axis_r.long()]
    angle_Tr, factor = position_Tr.float() * frequency_r, attention_factor(scaling)
    return (angle_Tr.cos() * factor).to(dtype), (angle_Tr.sin() * factor).to(dtype)


def rope_reference(
    q_Thd: Tensor, k_Thd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (q, k) with the first 2r dimensions of every head rotated, in plain torch."""
    cos, sin = cos_Tr[:, None], sin_Tr[:, None]
    r = cos_Tr.shape[1]

    def rotate(x: Tensor) -> Tensor:
        low, high, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)

    return rotate(q_Thd), rotate(k_Thd)


def qk_norm_rope_reference(
    q_Thd: Tensor,
    k_Thd: Tensor,
    wq_d: Tensor,
    wk_d: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return `rope_reference` of the zero-centred RMSNorm of each head of q and of k."""
    q, k = rmsnorm_reference(q_Thd, wq_d, eps), rmsnorm_reference(k_Thd, wk_d, eps)
    return rope_reference(q, k, cos_Tr, sin_Tr)


def rope_cos_sin(
    positions: Tensor,
    rd: int,
    theta: float,
    sections: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), both [T, rd/2] in `dtype`, for all layers of one forward pass.

    positions  [T], or [3, T] for time, height and width; integers, tokens contiguous
    sections   how many frequencies belong to each of the three axes; None is plain rope
    scaling    for contexts beyond those of the training; of a kind that `check_rope` passes
    """
    assert positions.stride(-1) == 1, "positions must be contiguous along tokens"
    assert positions.ndim == 1 or positions.shape[0] == 3, "positions are [T] or [3, T]"
    if not use_triton(positions):
        return rope_cos_sin_reference(positions, rd, theta, sections, dtype, scaling)
    frequency_r, axis_r = frequencies(rd, theta, sections, positions.device, scaling)
    num_tokens, r = positions.shape[-1], rd // 2
    cos_Tr = torch.empty((num_tokens, r), dtype=dtype, device=positions.device)
    sin_Tr = torch.empty_like(cos_Tr)
    axis_row = positions.stride(0) if positions.ndim == 2 else 0
    grid = (-(-num_tokens * r // _ANGLES),)
    pointers, factor = (positions, frequency_r, axis_r, cos_Tr, sin_Tr), attention_factor(scaling)
    _cos_sin_kernel[grid](*pointers, factor, num_tokens, axis_row, R=r, BLOCK=_ANGLES, **early())
    return cos_Tr, sin_Tr


@jit
def _cos_sin_kernel(
    positions, frequency, axis, cos, sin, factor, T, axis_row, R: tl.constexpr, BLOCK: tl.constexpr
):
    start_next()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < T * R
    i = at % R
    row, step = (
        tl.load(axis + i, mask=inside, other=0),
        tl.load(frequency + i, mask=inside, other=0.0),
    )
    wait_for_inputs()
    position = tl.load(positions + row * axis_row + at // R, mask=inside, other=0)
    store_angles(cos + at, sin + at, position, step, factor, inside)


@jit
def store_angles(cos, sin, position, step, factor, inside):
    """Store cosine and sine of positions times frequencies, in the dtype of these pointers."""
    angle = position.to(tl.float32) * step
    tl.store(cos, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=inside)


@jit
def with_partner(x, i, inside, R: tl.constexpr):
    """Return x [i] and x [the dimension that i is paired with, itself in the rest], in float32."""
    j = tl.where(i < R, i + R, i - R)
    own = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + j, mask=inside & (i < 2 * R), other=0.0).to(tl.float32)
    return own, tl.where(i < 2 * R, other, own)


@jit
def angles(cos, sin, t, i, known, R: tl.constexpr):
    """Return cos and signed sin for every dimension i; cos 1 and sin 0 where nothing is rotated."""
    at = t * R + i % R
    rotated = known & (i < 2 * R)
    c = tl.load(cos + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=rotated, other=0.0).to(tl.float32)
    return c, tl.where(i < R, -s, s)


@jit
def normed_and_rotated(x, other, w, other_w, c, s, out, eps, D: tl.constexpr):
    """Return heads x [rows, i], normed and rotated, in the dtype of the pointer `out`.

    other, other_w  the same at their partners; each product and the sum are rounded
    """
    dtype = out.dtype.element_ty
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = (x * scale * (1.0 + w)).to(dtype).to(tl.float32)
    other = (other * scale * (1.0 + other_w)).to(dtype).to(tl.float32)
    return ((x * c).to(dtype).to(tl.float32) + (other * s).to(dtype).to(tl.float32)).to(dtype)
