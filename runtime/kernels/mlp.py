"""The dense gated feed-forward, which is also one expert and the shared expert of the MoE layers.

    mlp(x) = down(silu(gate) * up),   [gate | up] = x W_gate_up^T
    shared_expert(x) = sigmoid(x W_sg^T) * mlp(x)

Source: Shazeer 2020, "GLU variants improve transformer"; Qwen3_5MLP of transformers for the casts:
each linear, silu and each product is rounded to the model dtype.
Trap: gate is the first half of gate_up, up the second; swapped halves have the right shapes.

For up to 4 rows one kernel makes gate, up and their product, for batch 1 decoding.

Shape letters: T tokens, H hidden, F inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from runtime.kernels.gemm_fp8 import (
    ROW_CHOICES,
    VECTOR_ROWS,
    Fp8Weight,
    Weight,
    linear,
    linear_reference,
    row_products,
    scale_edge,
)
from runtime.kernels.launch import autotune, jit, power_of_two, tl, use_triton

_ELEMENTS = 1024


@dataclass(frozen=True)
class Stored:
    """A weight [N, K], or a stack of them [E, N, K], as the kernels are told about it.

    edge  rows that share a scale: 0 where there are no scales, else 1 or 128
    """

    values: Tensor
    scale: Tensor
    edge: int

    @staticmethod
    def of(weight: object) -> Stored:
        """Return what the kernels need; the layout is asserted."""
        if isinstance(weight, Fp8Weight):
            return Stored(weight.codes, weight.scale, scale_edge(weight.codes, weight.scale))
        assert isinstance(weight, Tensor), "the kernels take Tensors and Fp8Weights"
        assert weight.is_contiguous(), "weights must be contiguous"
        return Stored(weight, weight, 0)

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Return the scale's strides; that of columns is 0 where a row has one scale."""
        return *self.scale.stride()[:-1], int(self.edge > 1)


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
        gate_up_T2F, out_TF, inner, BLOCK=_ELEMENTS, num_warps=4
    )
    return out_TF


def gated_linear(x_TH: Tensor, gate_up: Weight) -> Tensor:
    """Return silu(gate) * up [T, F] of [gate | up] = x gate_up^T.

    x_TH     [T, H] model dtype, contiguous
    gate_up  [2F, H], gate rows first
    """
    num_tokens, hidden = x_TH.shape
    if num_tokens > VECTOR_ROWS or not use_triton(x_TH):
        return silu_mul(linear(x_TH, gate_up))
    assert x_TH.is_contiguous(), "x must be contiguous"
    stored = Stored.of(gate_up)
    inner = stored.values.shape[0] // 2
    assert stored.values.shape == (2 * inner, hidden), "gate_up must be [2F, H]"
    out_TF = x_TH.new_empty((num_tokens, inner))
    _gated_rows_kernel[lambda meta: (-(-inner // meta["BLOCK_N"]),)](
        x_TH, stored.values, stored.scale, out_TF, num_tokens, hidden, inner,
        *stored.scale_strides, EDGE=stored.edge, ROWS=power_of_two(num_tokens),
    )  # fmt: skip
    return out_TF


def mlp(x_TH: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Return down(silu(gate) * up) [T, H].

    x_TH           [T, H] model dtype, contiguous
    gate_up, down  [2F, H], gate rows first, and [H, F]
    """
    return linear(gated_linear(x_TH, gate_up), down)


def shared_expert(x_TH: Tensor, gate_up: Weight, down: Weight, gate: Tensor) -> Tensor:
    """Return sigmoid(x gate^T) * mlp(x) [T, H].

    gate           [1, H], `shared_expert_gate`: one number for each token
    gate_up, down  [2S, H] and [H, S]; S is the shared expert's own size
    """
    return torch.sigmoid(linear(x_TH, gate)) * mlp(x_TH, gate_up, down)


@jit
def rounded(x, like):
    """Return x rounded to the dtype of the pointer `like`, in float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@jit
def silu_times(gate, up, like):
    """Return silu(gate) * up in float32, each step rounded to the dtype of the pointer `like`."""
    gate = rounded(gate, like)
    return rounded(gate * tl.sigmoid(gate), like) * rounded(up, like)


@jit
def _silu_mul_kernel(gate_up, out, F, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + 2 * t * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * t + 1) * F + i, mask=i < F, other=0.0).to(tl.float32)
    tl.store(out + t * F + i, silu_times(gate, up, out).to(out.dtype.element_ty), mask=i < F)


@jit
def gated_rows(
    x, gate_up, scale, out, M, H, F, scale_row, scale_col,
    EDGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store this program's columns of silu(gate) * up for the first M rows of x, at most ROWS."""
    f = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = row_products(
        x, gate_up, scale, f, f < F, M, H, H, scale_row, scale_col, EDGE, ROWS, BLOCK_N, BLOCK_K
    )
    up = row_products(
        x, gate_up, scale, F + f, f < F, M, H, H, scale_row, scale_col, EDGE, ROWS, BLOCK_N, BLOCK_K
    )
    m = tl.arange(0, ROWS)[:, None]
    product = silu_times(gate, up, out).to(out.dtype.element_ty)
    tl.store(out + m * F + f[None, :], product, mask=(m < M) & (f < F)[None, :])


@autotune(ROW_CHOICES, key=["H", "F", "ROWS", "EDGE"])
@jit
def _gated_rows_kernel(
    x, gate_up, scale, out, M, H, F, scale_row, scale_col,
    EDGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    gated_rows(x, gate_up, scale, out, M, H, F, scale_row, scale_col, EDGE, ROWS, BLOCK_N, BLOCK_K)
