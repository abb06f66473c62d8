"""The second product of `w8a8`: inner activations in FP8 times down, weighted.

Chosen for: `EXPERTS`, after the first product of w8a8.

The programs keep a block's activations on chip and walk along the rows of its expert: with F this
short a program for each tile would mostly wait for its first operands.

Shape letters: P pairs of a token and an expert, H hidden, F inner size, G groups of 128 columns.
"""

from __future__ import annotations

from runtime.kernels.launch import autotune, jit, operand, tl
from runtime.kernels.linear.row_parts import rounded
from runtime.kernels.moe.sort import block_of


@autotune(
    [
        {"BLOCK_N": n, "num_warps": w, "num_stages": s}
        for n, w, s in ((64, 8, 3), (64, 8, 2), (64, 4, 2), (64, 4, 3))
    ],
    key=["H", "F", "BLOCK_M", "TAIL"],
)
@jit
def down_kernel(
    inner,
    x_scale,
    down,
    scale,
    order,
    blocks,
    weights,
    out,
    P,
    H,
    F,
    scale_expert,
    scale_row,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the weighted outputs of one block's pairs, half a tile where they are few."""
    expert, first, end = block_of(blocks)
    if expert < 0:
        return
    if TAIL < BLOCK_M and end - first <= TAIL:
        _down_tiles(
            inner,
            x_scale,
            down,
            scale,
            order,
            expert,
            first,
            end,
            weights,
            out,
            P,
            H,
            F,
            scale_expert,
            scale_row,
            GROUPS,
            TAIL,
            BLOCK_N,
        )
        return
    _down_tiles(
        inner,
        x_scale,
        down,
        scale,
        order,
        expert,
        first,
        end,
        weights,
        out,
        P,
        H,
        F,
        scale_expert,
        scale_row,
        GROUPS,
        BLOCK_M,
        BLOCK_N,
    )


@jit
def _down_tiles(
    inner,
    x_scale,
    down,
    scale,
    order,
    expert,
    first,
    end,
    weights,
    out,
    P,
    H,
    F,
    scale_expert,
    scale_row,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    k, n = tl.arange(0, 128), tl.arange(0, BLOCK_N)
    x_rows = inner + place[:, None] * F + k[None, :]
    parts, scales = (), ()
    for g in tl.static_range(GROUPS):
        x_MK = tl.load(x_rows + g * 128, mask=used[:, None], other=0.0)
        parts += (operand(x_MK),)  # type: ignore[assignment]
        s_M = tl.load(x_scale + g * P + place, mask=used, other=0.0)
        scales += (s_M,)  # type: ignore[assignment]
    pair = tl.load(order + place, mask=used, other=0)
    weight = tl.load(weights + pair, mask=used, other=0.0).to(tl.float32)
    for start in range(0, H, BLOCK_N):
        h = start + n
        w_rows = down + (expert * H + h)[None, :] * F + k[:, None]
        s_row = scale + expert * scale_expert + start // 128 * scale_row
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for g in tl.static_range(GROUPS):
            w_KN = operand(tl.load(w_rows + g * 128, mask=(h < H)[None, :], other=0.0))
            product = tl.dot(parts[g], w_KN)
            total += product * (scales[g] * tl.load(s_row + g).to(tl.float32))[:, None]
        y_MN = (rounded(total, out) * weight[:, None]).to(out.dtype.element_ty)
        at = out + pair[:, None] * H + h[None, :]
        tl.store(at, y_MN, mask=used[:, None] & (h < H)[None, :])
