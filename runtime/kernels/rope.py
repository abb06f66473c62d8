"""Rotary position embedding of the first `rd` dimensions of a head, with and without its norm.

    angle[t, i] = position[t] * theta^(-2i / rd),  i < rd/2
    (x_i, x_{i+rd/2}) -> (x_i cos - x_{i+rd/2} sin,  x_{i+rd/2} cos + x_i sin),  the rest unchanged

Source: Su et al. 2021 (RoFormer); Qwen3.5 rotates a quarter of its head. Angles, cosines and sines
are float32 and cast to the model dtype; the rotation itself rounds to the model dtype twice.
Images and videos have three positions a token (time, height, width): with sections [11, 11, 10]
the frequencies are dealt out in turn, T H W T H W ..., and what is left over is T. Text has three
equal ones, which is plain rope.
Traps: the base of the exponent is the number of rotary dimensions (64), not head_dim (256). Pairs
lie rd/2 apart, not side by side.

Shape letters: T tokens, h heads, d head size, r rd/2 frequencies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.rmsnorm import rmsnorm_reference

if TYPE_CHECKING:
    from torch import Tensor

_ANGLES = 1024


def rope_cos_sin_reference(
    positions: Tensor,
    rd: int,
    theta: float,
    sections: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Say what `rope_cos_sin` computes, in plain torch."""
    frequency_r, axis_r = frequencies(rd, theta, sections, positions.device)
    position_Tr = positions.expand(3, -1).T[:, axis_r.long()]
    angle_Tr = position_Tr.float() * frequency_r
    return angle_Tr.cos().to(dtype), angle_Tr.sin().to(dtype)


def rope_reference(
    q_Thd: Tensor, k_Thd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor
) -> tuple[Tensor, Tensor]:
    """Say what `rope` computes, in plain torch."""
    cos, sin = cos_Tr[:, None], sin_Tr[:, None]
    r = cos_Tr.shape[1]

    def rotate(x: Tensor) -> Tensor:
        low, high, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)

    return rotate(q_Thd), rotate(k_Thd)


def qk_norm_rope_reference(
    q_Thd: Tensor, k_Thd: Tensor, wq_d: Tensor, wk_d: Tensor,
    cos_Tr: Tensor, sin_Tr: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Say what `qk_norm_rope` computes, in plain torch."""
    q, k = rmsnorm_reference(q_Thd, wq_d, eps), rmsnorm_reference(k_Thd, wk_d, eps)
    return rope_reference(q, k, cos_Tr, sin_Tr)


@lru_cache(maxsize=8)
def frequencies(
    rd: int, theta: float, sections: tuple[int, int, int] | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (frequency, axis) of each pair: [r] float32 and [r] int32, 0 time, 1 height, 2 width.

    Computed on the CPU, where every caller gets the same bits, and kept on `device`. A CUDA graph
    must not be the first to ask.
    """
    exponent = torch.arange(0, rd, 2, dtype=torch.int64).float() / rd
    axis = torch.zeros(rd // 2, dtype=torch.int32)
    if sections is not None:
        axis[1 : 3 * sections[1] : 3] = 1
        axis[2 : 3 * sections[2] : 3] = 2
    return (1.0 / theta**exponent).to(device), axis.to(device)


def rope_cos_sin(
    positions: Tensor,
    rd: int,
    theta: float,
    sections: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), both [T, rd/2] in `dtype`, for all layers of one forward pass.

    positions  [T], or [3, T] for time, height and width; integers, tokens contiguous
    sections   how many frequencies belong to each of the three axes; None is plain rope
    """
    assert positions.stride(-1) == 1, "positions must be contiguous along tokens"
    assert positions.ndim == 1 or positions.shape[0] == 3, "positions are [T] or [3, T]"
    if not use_triton(positions):
        return rope_cos_sin_reference(positions, rd, theta, sections, dtype)
    frequency_r, axis_r = frequencies(rd, theta, sections, positions.device)
    num_tokens, r = positions.shape[-1], rd // 2
    cos_Tr = torch.empty((num_tokens, r), dtype=dtype, device=positions.device)
    sin_Tr = torch.empty_like(cos_Tr)
    axis_row = positions.stride(0) if positions.ndim == 2 else 0
    grid = (-(-num_tokens * r // _ANGLES),)
    _cos_sin_kernel[grid](
        positions, frequency_r, axis_r, cos_Tr, sin_Tr, num_tokens, axis_row, R=r, BLOCK=_ANGLES
    )
    return cos_Tr, sin_Tr


def rope(q_Thd: Tensor, k_Thd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q, k) with the first 2r dimensions of every head rotated, as new tensors.

    q_Thd, k_Thd    [T, h, d] of one dtype, elements contiguous; heads and tokens at any stride
    cos_Tr, sin_Tr  [T, r] in the dtype of q, contiguous
    """
    _check(q_Thd, k_Thd, cos_Tr, sin_Tr)
    if not use_triton(q_Thd):
        return rope_reference(q_Thd, k_Thd, cos_Tr, sin_Tr)
    q, k = _empty(q_Thd), _empty(k_Thd)
    grid, blocks = _launch(q_Thd, k_Thd)
    _rope_kernel[grid](
        q_Thd, k_Thd, cos_Tr, sin_Tr, q, k, *_strides(q_Thd, k_Thd),
        D=q.shape[2], R=cos_Tr.shape[1], **blocks,
    )  # fmt: skip
    return q, k


def qk_norm_rope(
    q_Thd: Tensor, k_Thd: Tensor, wq_d: Tensor, wk_d: Tensor,
    cos_Tr: Tensor, sin_Tr: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `rope` of the zero-centred RMSNorm of each head of q and of k.

    q_Thd, k_Thd    [T, h, d] of one dtype, elements contiguous; q may be a view on [q | gate]
    wq_d, wk_d      [d] stored as w: the factor is 1 + w
    cos_Tr, sin_Tr  [T, r] in the dtype of q, contiguous
    """
    _check(q_Thd, k_Thd, cos_Tr, sin_Tr)
    assert wq_d.shape == wk_d.shape == q_Thd.shape[2:], "one weight for each element of a head"
    if not use_triton(q_Thd):
        return qk_norm_rope_reference(q_Thd, k_Thd, wq_d, wk_d, cos_Tr, sin_Tr, eps)
    q, k = _empty(q_Thd), _empty(k_Thd)
    grid, blocks = _launch(q_Thd, k_Thd)
    _qk_norm_rope_kernel[grid](
        q_Thd, k_Thd, wq_d, wk_d, cos_Tr, sin_Tr, q, k, *_strides(q_Thd, k_Thd), eps,
        D=q.shape[2], R=cos_Tr.shape[1], **blocks, **early(),
    )  # fmt: skip
    return q, k


def _check(q_Thd: Tensor, k_Thd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor) -> None:
    assert q_Thd.stride(2) == k_Thd.stride(2) == 1, "heads must be contiguous in themselves"
    assert q_Thd.shape[0] == k_Thd.shape[0] == cos_Tr.shape[0], "one row of angles for each token"
    assert q_Thd.shape[2] == k_Thd.shape[2] >= 2 * cos_Tr.shape[1], "no more angles than pairs"
    assert q_Thd.dtype == k_Thd.dtype == cos_Tr.dtype == sin_Tr.dtype, "one dtype throughout"
    assert cos_Tr.is_contiguous(), "cos must be contiguous"
    assert sin_Tr.is_contiguous(), "sin must be contiguous"


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _strides(q_Thd: Tensor, k_Thd: Tensor) -> tuple[int, ...]:
    num_tokens, num_q, _ = q_Thd.shape
    return num_tokens, num_q, k_Thd.shape[1], *q_Thd.stride()[:2], *k_Thd.stride()[:2]


def _launch(q_Thd: Tensor, k_Thd: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    num_tokens, num_q, d = q_Thd.shape
    rows = min(8, power_of_two(num_tokens))
    grid = (-(-num_tokens // rows), num_q + k_Thd.shape[1])
    return grid, {"ROWS": rows, "BLOCK": power_of_two(d), "num_warps": min(rows, 4)}


@jit
def _cos_sin_kernel(
    positions, frequency, axis, cos, sin, T, axis_row, R: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < T * R
    i = at % R
    row = tl.load(axis + i, mask=inside, other=0)
    position = tl.load(positions + row * axis_row + at // R, mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(frequency + i, mask=inside, other=0.0)
    tl.store(cos + at, tl.cos(angle).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + at, tl.sin(angle).to(sin.dtype.element_ty), mask=inside)


@jit
def _angles(cos, sin, t, i, inside, R: tl.constexpr):
    """Return cos and signed sin for every dimension i; cos 1 and sin 0 where nothing is rotated."""
    at = t * R + i % R
    rotated = inside & (i < 2 * R)
    c = tl.load(cos + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=rotated, other=0.0).to(tl.float32)
    return c, tl.where(i < R, -s, s)


@jit
def _partner(i, R: tl.constexpr):
    """Return the dimension that i is paired with: rd/2 further on or back, itself in the rest."""
    return tl.where(i < R, i + R, tl.where(i < 2 * R, i - R, i))


@jit
def _rotated(x, other, cos, sin, out, t, i, inside, R: tl.constexpr):
    """Return x cos + partner sin, each product and the sum rounded to the dtype of `out`."""
    c, s = _angles(cos, sin, t, i, inside, R)
    kept = (x * c).to(out.dtype.element_ty).to(tl.float32)
    mixed = (other * s).to(out.dtype.element_ty).to(tl.float32)
    return (kept + mixed).to(out.dtype.element_ty)


@jit
def _rope_heads(
    x, cos, sin, out, head, num_heads, T, row, step,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (i < D)
    source = x + t * row + head * step
    x_Td = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    other_Td = tl.load(source + _partner(i, R), mask=inside, other=0.0).to(tl.float32)
    y_Td = _rotated(x_Td, other_Td, cos, sin, out, t, i, inside, R)
    tl.store(out + (t * num_heads + head) * D + i, y_Td, mask=inside)


@jit
def _rope_kernel(
    q, k, cos, sin, q_out, k_out, T, num_q, num_k, q_row, q_head, k_row, k_head,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    if head < num_q:
        _rope_heads(q, cos, sin, q_out, head, num_q, T, q_row, q_head, D, R, ROWS, BLOCK)
    else:
        head -= num_q
        _rope_heads(k, cos, sin, k_out, head, num_k, T, k_row, k_head, D, R, ROWS, BLOCK)


@jit
def normed_and_rotated(
    x, weight, cos, sin, out, head, t, i, inside, row, step, eps, D: tl.constexpr, R: tl.constexpr
):
    """Return tokens t [ROWS, 1] of one head of x, normed and rotated, in the dtype of `out`."""
    j = _partner(i, R)
    source = x + t * row + head * step
    x_Td = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    other_Td = tl.load(source + j, mask=inside, other=0.0).to(tl.float32)
    w_d = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)
    other_w_d = tl.load(weight + j, mask=i < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_Td * x_Td, 1) / D + eps)[:, None]
    x_Td = (x_Td * scale * (1.0 + w_d)).to(out.dtype.element_ty).to(tl.float32)
    other_Td = (other_Td * scale * (1.0 + other_w_d)).to(out.dtype.element_ty).to(tl.float32)
    return _rotated(x_Td, other_Td, cos, sin, out, t, i, inside, R)


@jit
def _norm_rope_heads(
    x, weight, cos, sin, out, head, num_heads, T, row, step, eps,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (t < T) & (i < D)
    y_Td = normed_and_rotated(x, weight, cos, sin, out, head, t, i, inside, row, step, eps, D, R)
    tl.store(out + (t * num_heads + head) * D + i, y_Td, mask=inside)


@jit
def _qk_norm_rope_kernel(
    q, k, wq, wk, cos, sin, q_out, k_out, T, num_q, num_k, q_row, q_head, k_row, k_head, eps,
    D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start_next()
    wait_for_inputs()
    head = tl.program_id(1)
    if head < num_q:
        _norm_rope_heads(
            q, wq, cos, sin, q_out, head, num_q, T, q_row, q_head, eps, D, R, ROWS, BLOCK
        )
    else:
        head -= num_q
        _norm_rope_heads(
            k, wk, cos, sin, k_out, head, num_k, T, k_row, k_head, eps, D, R, ROWS, BLOCK
        )
