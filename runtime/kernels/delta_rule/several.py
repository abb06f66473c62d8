"""The next tokens of sequences through a delta-rule layer, whose norm is left to the product after.

Chosen for: `RULE_STEP` with several tokens of a sequence before a small product of floats.

A program has some columns of a head's state, as in within, and gates what comes out of them; of the
norm it writes the sum of squares of its columns. The product after it adds these sums, and scales x
by them: see norm.gated's `Unscaled`. So this is one kernel.

Three more of each head write the histories.

Trap: other programs may still be reading the history of q and k that a sequence continues. Its
source must be none of the slots that its tokens leave their states in.

Source, other traps and rounding: see head, conv1d, rule, step and norm.gated.

Shape letters: as in mixed_step; P programs of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.conv1d_step import history_after, store_history
from runtime.kernels.delta_rule.head import (
    arguments,
    channels,
    head_before,
    head_convolved,
    head_inputs,
    head_window,
    rows_each,
)
from runtime.kernels.delta_rule.step import advance, gates
from runtime.kernels.launch import jit, loaded, power_of_two, tl
from runtime.kernels.norm.gated import Unscaled
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule

# H200, 0.8B, a step with 1, 2 and 3 drafts: 695, 852 and 968 us with 16 columns, 717, 869 and 941
# with 8, of which each token takes less time
_COLUMNS, _FEWER_COLUMNS, _MANY_TOKENS = 16, 8, 4


def several_unscaled(
    qkv_DC: Tensor,
    z_DVv: Tensor,
    a_DV: Tensor,
    b_DV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources_B: Tensor,
    slots_D: Tensor,
) -> Unscaled:
    """Return `mixed_step`, its norm's roots still to be multiplied by; no source is a slot."""
    of_head = arguments(qkv_DC, z_DVv, a_DV, b_DV, rule, conv_pool, state_pool)
    (heads, dv), (_, dk) = rule.values, rule.keys
    each = rows_each(sources_B, slots_D)
    columns = min(_COLUMNS if each < _MANY_TOKENS else _FEWER_COLUMNS, power_of_two(dv))
    tiles, rows = -(-dv // columns), len(slots_D)
    y = torch.empty((rows, heads * dv), dtype=qkv_DC.dtype, device=qkv_DC.device)
    squares = torch.empty((rows, heads, tiles), dtype=torch.float32, device=qkv_DC.device)
    _several_kernel[(tiles + 3, heads, len(sources_B))](
        sources=sources_B,
        slots=slots_D,
        z=z_DVv,
        norm=rule.norm_v,
        y=y,
        squares=squares,
        z_row=z_DVv.stride(0),
        EACH=each,
        BV=columns,
        TILES=tiles,
        BLOCK=power_of_two(max(dk, dv)),
        BJ=power_of_two(rule.conv_C1K.shape[2]),
        num_warps=1,
        **of_head,
        **early(),
    )
    return Unscaled(y, squares, dv, rule.eps)


@jit
def _write_histories(
    qkv,
    qkv_row,
    conv_pool,
    conv_row,
    source,
    slots,
    h,
    part,
    EACH: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BJ: tl.constexpr,
):
    """Write what the convolution of a head's channels needs after each token of a sequence.

    part  0, 1 or 2: channels of q, k or v; the value heads of a key head share those of q and k
    """
    key, i = h // (V // H) * DK, tl.arange(0, BLOCK)
    c = i + tl.where(part < 2, key + part * H * DK, 2 * H * DK + h * DV)
    width = tl.where(part < 2, tl.where(h % (V // H) == 0, DK, 0), DV)
    inside, history = i < tl.where(source >= 0, width, 0), conv_pool + source * conv_row
    targets = loaded(slots, source >= 0, 1, EACH)
    for token in tl.static_range(EACH):
        kept = history_after(qkv + c, qkv_row, history + c * (K - 1), inside, token, K, BJ)
        slot_at = conv_pool + targets[token].to(tl.int64) * conv_row
        store_history(kept, slot_at + c * (K - 1), inside, K)


@jit
def _several_kernel(
    qkv,
    z,
    a,
    b,
    filters,
    A_log,
    dt_bias,
    norm,
    conv_pool,
    pool,
    sources,
    slots,
    y,
    squares,
    qkv_row,
    z_row,
    a_row,
    b_row,
    conv_row,
    pool_row,
    scale,
    eps,
    EACH: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    BJ: tl.constexpr,
):
    start_next()
    tile, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    source, t = tl.load(sources + n).to(tl.int64), n * EACH
    y_at = y + (t * V + h) * DV + j
    square_at = squares + (t * V + h) * TILES + tile
    # states, histories and weights do not depend on the kernels before
    is_rule = (source >= 0) & (tile < TILES)
    keys, columns = i < tl.where(is_rule, DK, 0), j < tl.where(source >= 0, DV, 0)
    inside = keys[:, None] & columns[None, :]
    state_at = pool + (h * DK + i[:, None]) * DV + j[None, :]
    S_kv = tl.load(state_at + source * pool_row, mask=inside, other=0.0)
    at, history = channels(h, i, j, H, V, DK, DV), conv_pool + source * conv_row
    past = head_before(filters, history, at, keys, columns, K)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    w_v = tl.load(norm + j, mask=columns, other=0.0).to(tl.float32)
    targets = loaded(slots + t, source >= 0, 1, EACH)
    wait_for_inputs()
    if tile >= TILES:
        _write_histories(
            qkv + t * qkv_row,
            qkv_row,
            conv_pool,
            conv_row,
            source,
            slots + t,
            h,
            tile - TILES,
            EACH,
            H,
            V,
            DK,
            DV,
            K,
            BLOCK,
            BJ,
        )
        return
    if source < 0:
        for token in tl.static_range(EACH):
            tl.store(y_at + token * V * DV, tl.zeros((BV,), y.dtype.element_ty), mask=j < DV)
            tl.store(square_at + token * V * TILES, 0.0)
        return

    inputs = head_inputs(qkv + t * qkv_row, qkv_row, at, keys, columns, EACH)
    a_s = loaded(a + t * a_row + h, source >= 0, a_row, EACH)
    b_s = loaded(b + t * b_row + h, source >= 0, b_row, EACH)
    z_s = loaded(z + t * z_row + h * DV + j, columns, z_row, EACH)
    window = head_window(past, inputs)
    for token in tl.static_range(EACH):
        g, beta = gates(a_s[token], b_s[token], A_h, bias_h, b)
        heads = head_convolved(past, window, y, token, K)
        o_v, S_kv = advance(S_kv, *heads, tl.exp(g), beta, scale, eps)
        o_v, z_v = o_v.to(y.dtype.element_ty).to(tl.float32), z_s[token].to(tl.float32)
        y_v = o_v * w_v * (z_v * tl.sigmoid(z_v))
        tl.store(y_at + token * V * DV, y_v.to(y.dtype.element_ty), mask=columns)
        tl.store(square_at + token * V * TILES, tl.sum(o_v * o_v, 0))
        S_kv = S_kv.to(pool.dtype.element_ty)
        tl.store(state_at + targets[token].to(tl.int64) * pool_row, S_kv, mask=inside)
