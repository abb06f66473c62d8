"""A walk along the chunks of a prompt with columns of the state in registers: device code.

Chosen for: never alone; prefill and halves share it.

With W, Y, G and u of `solve`, and S the state before a chunk:

    r = v - diag(e^G uk) k S      o = diag(e^G uq / sqrt(dk)) q S + Y r      S <- e^G_C S + k^T W r

Norms and decays stay outside the products with k and q, whose operands are then exact inputs.

Shape letters: H key heads, V value heads, k key size, v value size, C chunk, P padded tokens.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, operand, tl


@jit
def _advance(
    S_vk,
    k_CK,
    q_CK,
    v_CV,
    WY,
    k_scale,
    q_scale,
    decay,
    C: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return (o [C, v], the state after) of one chunk.

    Everything is transposed, [columns, tokens]: then each product's left side is the result of the
    one before, which a tensor core takes from registers.
    """
    k_, q_ = operand(k_CK), operand(q_CK)
    S_ = operand(S_vk.to(k_CK.dtype))
    S_vk *= decay
    r_vC = tl.dot(S_, tl.trans(k_), input_precision=PRECISION) * k_scale[None, :]
    r_vC = tl.trans(operand(v_CV)) + r_vC
    o_vC = tl.dot(S_, tl.trans(q_), input_precision=PRECISION) * q_scale[None, :]
    r_ = operand(r_vC.to(k_CK.dtype))
    both = tl.dot(r_, tl.trans(operand(WY)), input_precision=PRECISION)
    d_vC, y_vC = tl.split(tl.permute(tl.reshape(both, (BV, 2, C)), (0, 2, 1)))
    d_ = operand(d_vC.to(k_CK.dtype))
    return tl.trans(o_vC + y_vC), tl.dot(d_, k_, S_vk, input_precision=PRECISION)


@jit
def _tile(x, h, t, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ROWS tokens and COLUMNS of one head behind a descriptor."""
    return tl.reshape(x.load([h, t, column]), (ROWS, COLUMNS))


@jit
def walked(
    q,
    k,
    v,
    o,
    solved,
    o_at,
    factors,
    S_vk,
    h,
    start,
    end,
    column,
    further,
    known,
    P,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the state after the tokens from start to end; their outputs are written.

    S_vk     the state before, BV columns of head h
    further  how many rows of o further down the outputs are
    known    whether there are values: else they are zeros; None: there are
    """
    c = tl.arange(0, C)
    j = column + tl.arange(0, BV)
    factor = factors + h.to(tl.int64) * P + start
    k_scale, q_scale = tl.load(factor + c), tl.load(factor + V * P + c)
    decay = tl.load(factor + 2 * V * P)
    whole = start + (end - start) // C * C
    for t in range(start, whole, C):
        k_CK, q_CK = _tile(k, h // REPEAT, t, 0, C, BK), _tile(q, h // REPEAT, t, 0, C, BK)
        v_CV = _tile(v, h, t, column, C, BV)
        if known is not None:
            v_CV = tl.where(known, v_CV, 0.0).to(v.dtype)
        WY = tl.reshape(solved.load([0, h * P + t, 0]), (2 * C, C))
        # in registers a chunk ahead: only what a product reads is prefetched by itself
        factor += C
        next_k_scale, next_q_scale = tl.load(factor + c), tl.load(factor + V * P + c)
        next_decay = tl.load(factor + 2 * V * P)
        o_CV, S_vk = _advance(S_vk, k_CK, q_CK, v_CV, WY, k_scale, q_scale, decay, C, BV, PRECISION)
        o.store([h, t + further, column], tl.reshape(o_CV.to(o.dtype), (1, C, BV)))
        k_scale, q_scale, decay = next_k_scale, next_q_scale, next_decay
    if whole < end:
        # what follows the sequence is another's, and may be anything
        inside = c < end - whole
        row = inside[:, None]
        k_CK = tl.where(row, _tile(k, h // REPEAT, whole, 0, C, BK), 0.0).to(k.dtype)
        q_CK = tl.where(row, _tile(q, h // REPEAT, whole, 0, C, BK), 0.0).to(k.dtype)
        valued = row if known is None else row & known
        v_CV = tl.where(valued, _tile(v, h, whole, column, C, BV), 0.0).to(k.dtype)
        WY = tl.where(row[None, :], solved.load([0, h * P + whole, 0]), 0.0).to(k.dtype)
        WY = tl.reshape(WY, (2 * C, C))
        k_scale = tl.where(inside, k_scale, 0.0)
        o_CV, S_vk = _advance(S_vk, k_CK, q_CK, v_CV, WY, k_scale, q_scale, decay, C, BV, PRECISION)
        at = o_at + ((whole + further + c).to(tl.int64) * V + h)[:, None] * DV + j[None, :]
        tl.store(at, o_CV.to(o.dtype), mask=row & (j < DV)[None, :])
    return S_vk
