"""One token of each sequence on a GPU: a program takes some columns of one head's state.

Chosen for: `RULE_STEP` with 256 states or more, always with a gate. Without one,
`benchmarks/hopper_rule.py` compares the rule alone with flash-linear-attention.

    retrieved = e^g S^T k      d = beta (v - retrieved)      o = e^g S^T q + (k.q) d

This is the rule (see rule) with both products taken against the old state, so that one reduction
gives them. The time is that of reading and writing the states. Padding slots are negative: zeros
out. With a gate a program has a whole head, whose norm and gate it then applies to o, rounded
first.

Traps: a state is loaded while the preceding kernels still run, so these must not write it: between
two steps of one pool there must be a kernel that is not launched early, such as a model's
embedding. A value that is widened where it is loaded is waited for there, before the next load: so
all inputs are loaded first.

Shape letters: B sequences, V value heads, k key size, v value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.delta_rule.rule import EPS
from runtime.kernels.launch import INTERPRET, jit, power_of_two, tl
from runtime.kernels.norm.gated import gated_norm
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.norm.gated import Gate

# states below which a GPU's multiprocessors have one each
_FEW = 256
# programs that are on an H200 together, two on a multiprocessor, with whole states in registers
_AT_ONCE = 264


def launch_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    gate: Gate | None,
) -> Tensor:
    """Return o of `gated_delta_step`, whose docstring names the arguments."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    batch, heads, dv = v.shape
    dk = k.shape[2]
    columns, warps = _shape(batch * heads, state_pool.dtype, whole=gate is not None)
    columns = min(columns, power_of_two(dv))
    tiles = 1 if gate is None else -(-dv // columns)
    z, norm, norm_eps = (gate.z_TVd, gate.weight_d, gate.eps) if gate else (None, None, 0.0)
    _step_kernel[(-(-dv // (columns * tiles)), heads, batch)](
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state_pool,
        slots,
        z,
        norm,
        o,
        *(x.stride(0) for x in (q, k, v, a, b, state_pool)),
        0 if z is None else z.stride(0),
        dk**-0.5,
        EPS,
        norm_eps,
        V=heads,
        REPEAT=heads // k.shape[1],
        DK=dk,
        DV=dv,
        BK=power_of_two(dk),
        BV=columns,
        TILES=tiles,
        num_warps=warps,
        **early(),
    )
    return o


def _shape(states: int, dtype: torch.dtype, *, whole: bool) -> tuple[int, int]:
    """Return (columns, warps) of a program for so many states, batch times heads.

    whole  it takes all columns of a head, so many at a time: of 256 states, four layers of 35B-A3B,
           all 128 before it waits 385 us, 64 of them 387; of 384 of 27B 564 and 553

    Microseconds on an H200, head size 128, replayed in a CUDA graph with a cold L2 cache. An empty
    graph takes 4, and copying what 3072 states move 96 (float32) or 48 (bfloat16). Measured before
    all inputs were loaded first, which takes 3072 float32 states to 104.

        states  dtype       16, 1   32, 1   32, 2   64, 2   64, 4
            48  float32       7.2     7.9     7.7     8.3     8.0
           384  float32      18.5    18.3    18.9    19.6    19.5
          3072  float32     124.3   109.2   109.7   107.0   106.0
          6144  float32     243.7   214.2   214.3   205.2   203.2
          3072  bfloat16     81.8    71.2    74.6    78.3    82.6
          6144  bfloat16    165.2   135.6   147.8   150.1   159.4
    """
    if whole and states <= _AT_ONCE:
        return 128, 4
    if whole or (states >= 1024 and dtype == torch.float32):
        return 64, 4
    return (32, 1) if states >= _FEW else (16, 1)


@jit
def gates(a, b, A_log, dt_bias, rounded):
    """Return (g, beta) from loaded values; beta is rounded to the dtype `rounded` points to."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    e = tl.exp(-tl.abs(x))
    # log(1 + e) to the last bits also where 1 + e rounds (Kahan)
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    g = -tl.exp(A_log.to(tl.float32)) * (tl.maximum(x, 0.0) + log1p)
    beta = tl.sigmoid(b.to(tl.float32)).to(rounded.dtype.element_ty)
    return g, beta.to(tl.float32)


@jit
def _add_both(x, y, z, w):
    return x + z, y + w


@jit
def _add_three(x, y, z, u, v, w):
    return x + u, y + v, z + w


@jit
def _numbers(x, AGAIN: tl.constexpr):
    """Return a state in float32; AGAIN in other instructions, so that it is not kept meanwhile.

    A state in bfloat16 takes half the registers, and twice as many programs are resident.
    """
    if INTERPRET or x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
    elif AGAIN:
        moves: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        x = tl.inline_asm_elementwise(moves, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    else:
        shifts: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        x = tl.inline_asm_elementwise(shifts, "=r,=r,r", [x], tl.float32, is_pure=True, pack=2)
    return x


@jit
def advance(S_kv, q_k, k_k, v_v, decay, beta, scale, eps):
    """Return (o, the state after) of some columns; q and k are not normalised yet.

    S_kv  float32 or bfloat16; all else float32
    """
    qq, kk, kq = tl.reduce((q_k * q_k, k_k * k_k, k_k * q_k), 0, _add_three)
    q_unit, k_unit = tl.rsqrt(qq + eps) * scale, tl.rsqrt(kk + eps)
    S = _numbers(S_kv, AGAIN=False)
    retrieved, read = tl.reduce((S * k_k[:, None], S * q_k[:, None]), 0, _add_both)
    d_v = (v_v - retrieved * (k_unit * decay)) * beta
    o_v = read * (q_unit * decay) + (kq * k_unit * q_unit) * d_v
    return o_v, _numbers(S_kv, AGAIN=True) * decay + k_k[:, None] * (d_v * k_unit)[None, :]


@jit
def _values(at, j, DV: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr):
    """Return a tuple of the values of each tile, not widened."""
    values = ()
    for tile in tl.static_range(TILES):
        v_v = tl.load(at + tile * BV, mask=j + tile * BV < DV, other=0.0)
        values += (v_v,)  # type: ignore[assignment]
    return values


@jit
def _step_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    pool,
    slots,
    z,
    norm,
    o,
    q_row,
    k_row,
    v_row,
    a_row,
    b_row,
    pool_row,
    z_row,
    scale,
    eps,
    norm_eps,
    V: tl.constexpr,
    REPEAT: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
):
    start_next()
    h = tl.program_id(1)
    n = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    o_at = o + (n * V + h) * DV + j
    state_at = pool + slot * pool_row + (h * DK + i[:, None]) * DV + j[None, :]
    known = (i < tl.where(slot >= 0, DK, 0))[:, None]
    S_kv = tl.load(state_at, mask=known & (j < DV)[None, :], other=0.0)
    A_h, bias_h = tl.load(A_log + h), tl.load(dt_bias + h)
    wait_for_inputs()
    if slot < 0:
        for tile in tl.static_range(TILES):
            tl.store(
                o_at + tile * BV, tl.zeros_like(j).to(o.dtype.element_ty), mask=j + tile * BV < DV
            )
        return

    # none is widened before all are asked for
    key = (h // REPEAT) * DK + i
    q_k = tl.load(q + n * q_row + key, mask=i < DK, other=0.0)
    k_k = tl.load(k + n * k_row + key, mask=i < DK, other=0.0)
    a_h, b_h = tl.load(a + n * a_row + h), tl.load(b + n * b_row + h)
    values = _values(v + n * v_row + h * DV + j, j, DV, BV, TILES)
    q_k, k_k = q_k.to(tl.float32), k_k.to(tl.float32)
    g, beta = gates(a_h, b_h, A_h, bias_h, b)
    decay = tl.exp(g)
    outputs, squares = (), 0.0
    for tile in tl.static_range(TILES):
        at, held = state_at + tile * BV, known & (j + tile * BV < DV)[None, :]
        if tile > 0:
            S_kv = tl.load(at, mask=held, other=0.0)
        v_v = values[tile].to(tl.float32)
        o_v, S_kv = advance(S_kv, q_k, k_k, v_v, decay, beta, scale, eps)
        tl.store(at, S_kv.to(pool.dtype.element_ty), mask=held)
        o_v = o_v.to(o.dtype.element_ty).to(tl.float32)
        outputs += (o_v,)  # type: ignore[assignment]
        squares += tl.sum(o_v * o_v, 0)
    root = tl.rsqrt(squares / DV + norm_eps)
    for tile in tl.static_range(TILES):
        inside, o_v = j + tile * BV < DV, outputs[tile]
        if norm is not None:
            w_v = tl.load(norm + j + tile * BV, mask=inside, other=0.0).to(tl.float32)
            z_v = tl.load(z + n * z_row + h * DV + j + tile * BV, mask=inside, other=0.0)
            o_v = gated_norm(o_v, z_v.to(tl.float32), w_v, root, norm, o)
        tl.store(o_at + tile * BV, o_v.to(o.dtype.element_ty), mask=inside)
