"""The dense gated feed-forward, which is also one expert and the shared expert of the MoE layers.

Chosen for: `GATED` of more than 8 rows, or packed. Every dense feed-forward goes through `mlp`.

    mlp(x) = down(silu(gate) * up),   [gate | up] = x W_gate_up^T
    shared_expert(x) = sigmoid(x W_sg^T) * mlp(x)

Source: Shazeer 2020, "GLU variants improve transformer"; Qwen3_5MLP of transformers for the casts:
each linear, silu and each product is rounded to the model dtype.
Trap: gate is the first half of gate_up, up the second; swapped halves have the right shapes.

Shape letters: T tokens, H hidden, F inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from runtime.kernels.cases import Gated
from runtime.kernels.dispatch import GATED
from runtime.kernels.encode.lined import Lined
from runtime.kernels.encode.rows import Codes, quantized
from runtime.kernels.launch import gluon_runs, jit, tl, use_triton
from runtime.kernels.linear.few_gated import few_gated
from runtime.kernels.linear.packed import PackedWeight
from runtime.kernels.linear.packed_roles import lined_gated, lined_parts, nvfp4_gated
from runtime.kernels.linear.packed_stream import packed_gated
from runtime.kernels.linear.product import (
    codes_linear,
    codes_update,
    linear,
    linear_reference,
    linear_update,
    lines_up,
    takes_codes,
    takes_lined,
)
from runtime.kernels.linear.roles_gated import roles_gated
from runtime.kernels.linear.row import added_linear
from runtime.kernels.linear.row_gated import row_gated
from runtime.kernels.linear.rows_gated import rows_gated
from runtime.kernels.linear.weight import BLOCK, form_of
from runtime.kernels.norm.rms import rmsnorm
from runtime.kernels.overlap import early, start_next, wait_for_inputs
from runtime.kernels.silu import silu_times

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.linear.weight import Weight
    from runtime.kernels.norm.rms import Parts

_ELEMENTS = 1024
_ROWS = 16


def silu_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """Say what `silu_mul` computes, in plain torch."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return silu(gate) * up


def gated_linear_reference(x_TH: Tensor, gate_up: Weight) -> Tensor:
    """Say what `gated_linear` computes, in plain torch."""
    return silu_mul_reference(linear_reference(x_TH, gate_up))


def mlp_reference(x_TH: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Say what `mlp` computes, in plain torch."""
    return linear_reference(gated_linear_reference(x_TH, gate_up), down)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(first half) * second half [T, F] in the dtype of gate_up.

    gate_up_T2F  [T, 2F] contiguous
    """
    assert gate_up_T2F.is_contiguous(), "gate_up must be contiguous"
    if not use_triton(gate_up_T2F):
        return silu_mul_reference(gate_up_T2F)
    num_tokens, inner = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty((num_tokens, inner))
    _silu_mul_kernel[(num_tokens, -(-inner // _ELEMENTS))](
        gate_up_T2F, out_TF, inner, BLOCK=_ELEMENTS, num_warps=4, **early()
    )
    return out_TF


def gated_linear(x_TH: Tensor, gate_up: Weight, codes: Codes | Lined | None = None) -> Tensor:
    """Return silu(gate) * up [T, F] of [gate | up] = x gate_up^T.

    x_TH     [T, H] model dtype, contiguous
    gate_up  [2F, H], gate rows first
    codes    those of x, if there are any
    """
    serve = _gated(_case(x_TH, gate_up))
    if serve is silu_mul:
        return silu_mul(linear(x_TH, gate_up, codes))
    further = (codes,) if serve is nvfp4_gated else ()
    out_TF: Tensor = serve(x_TH, gate_up, *further)
    return out_TF


def added_mlp(x_MH: Tensor, norm_H: Tensor, eps: float, gate_up: Weight, down: Weight) -> Tensor:
    """Return x plus the feed-forward of its norm, [M, H], of x before the norm, on a GPU.

    x_MH  a row, or a few where `GATED` has them in registers
    """
    if not isinstance(gate_up, PackedWeight):
        return added_linear(row_gated(x_MH, gate_up, norm_H, eps), down, x_MH)
    return added_linear(packed_gated(rmsnorm(x_MH, norm_H, eps), gate_up), down, x_MH)


def _case(x_TH: Tensor, gate_up: Weight) -> Gated:
    rows, k = x_TH.shape
    gluon, form = gluon_runs(x_TH.get_device()), form_of(gate_up)[0]
    made = gate_up.shape[0], gluon, lines_up(gate_up, x_TH)
    return Gated(use_triton(x_TH), rows, k, x_TH.dtype, form, *made)


def mlp(x_TH: Tensor, gate_up: Weight, down: Weight, codes: Codes | Lined | None = None) -> Tensor:
    """Return down(silu(gate) * up) [T, H].

    x_TH           [T, H] model dtype, contiguous
    gate_up, down  [2F, H], gate rows first, and [H, F]
    codes          those of x, if there are any
    """
    if not takes_codes(down, x_TH):
        return linear(gated_linear(x_TH, gate_up, codes), down)
    return codes_linear(silu_mul_quantised(linear(x_TH, gate_up, codes)), down, x_TH)


def mlp_update(
    x_TH: Tensor, gate_up: Weight, down: Weight, codes: Codes | Lined | None = None
) -> Tensor | Parts:
    """Return `mlp`, or parts of it where the norm after it adds them."""
    if takes_codes(down, x_TH):
        return codes_update(silu_mul_quantised(linear(x_TH, gate_up, codes)), down, x_TH)
    if takes_lined(down, x_TH) and takes_lined(gate_up, x_TH):
        return lined_parts(lined_gated(x_TH, gate_up, codes), down)
    return linear_update(gated_linear(x_TH, gate_up, codes), down)


def silu_mul_quantised(gate_up_T2F: Tensor) -> Codes:
    """Return `quantize_rows` of `silu_mul`, groups of 128 and rows in sixteens, on a GPU.

    gate_up_T2F  [T, 2F] contiguous, F a multiple of 128
    """
    num_tokens, inner = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    codes = Codes.room(num_tokens, inner, gate_up_T2F.device)
    _silu_mul_quantised_kernel[(inner // BLOCK, -(-num_tokens // _ROWS))](
        gate_up_T2F,
        *codes,
        num_tokens,
        inner,
        codes.scale.stride(1),
        ROWS=_ROWS,
        num_warps=4,
        **early(),
    )
    return codes


def shared_expert(
    x_TH: Tensor, gate_up: Weight, down: Weight, gate: Tensor, codes: Codes | Lined | None = None
) -> Tensor:
    """Return sigmoid(x gate^T) * mlp(x) [T, H].

    gate           [1, H], `shared_expert_gate`: one number for each token
    gate_up, down  [2S, H] and [H, S]; S is the shared expert's own size
    codes          those of x, if there are any
    """
    return torch.sigmoid(linear(x_TH, gate)) * mlp(x_TH, gate_up, down, codes)


@jit
def _silu_mul_kernel(gate_up, out, F, BLOCK: tl.constexpr):
    start_next()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs()
    gate = tl.load(gate_up + 2 * t * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * t + 1) * F + i, mask=i < F, other=0.0).to(tl.float32)
    tl.store(out + t * F + i, silu_times(gate, up, out), mask=i < F)


@jit
def _silu_mul_quantised_kernel(gate_up, codes, scale, T, F, height, ROWS: tl.constexpr):
    start_next()
    # columns first: programs that run at once then read rows as they lie, 178 us for 185
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    rows, inside = t.to(tl.int64)[:, None], (t < T)[:, None]
    wait_for_inputs()
    gate = tl.load(gate_up + 2 * rows * F + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * rows + 1) * F + f, mask=inside, other=0.0).to(tl.float32)
    q, s = quantized(silu_times(gate, up, gate_up).to(tl.float32), codes)
    tl.store(codes + rows * F + f, q, mask=inside)
    tl.store(scale + tl.program_id(0) * height + t, s, mask=t < T)


_gated = GATED.bind(
    row_gated, packed_gated, few_gated, rows_gated, roles_gated, nvfp4_gated, silu_mul
)
