"""One head of the next tokens of a sequence: what programs of whole, within and several share.

Chosen for: never alone.

Before it waits, a program loads what earlier steps left (the state, the inputs that the convolution
still needs) and the weights; after it the projections of all tokens, and none is widened before all
are asked for. Then it convolves the channels of its head.

Traps and rounding: see conv1d, rule and step.

Shape letters: as in mixed_step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.kernels.delta_rule.conv1d_step import convolved, taps_before
from runtime.kernels.delta_rule.rule import EPS
from runtime.kernels.launch import jit, loaded, power_of_two, tl, widened
from runtime.kernels.norm.gated import gated_norm

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.delta_rule.rule import Rule


def rows_each(sources_B: Tensor, slots_D: Tensor) -> int:
    """Return how many rows a sequence has."""
    each = slots_D.numel() // sources_B.numel()
    assert slots_D.numel() == each * sources_B.numel(), "as many rows for each sequence"
    return each


def arguments(
    qkv_DC: Tensor,
    z_DVv: Tensor,
    a_DV: Tensor,
    b_DV: Tensor,
    rule: Rule,
    conv_pool: Tensor,
    state_pool: Tensor,
) -> dict[str, Any]:
    """Return what both kernels are launched with, by name; inputs, weights and pools must fit."""
    _check(qkv_DC, z_DVv, rule, conv_pool, state_pool)
    (heads, dv), (key_heads, dk) = rule.values, rule.keys
    return {
        "qkv": qkv_DC,
        "a": a_DV,
        "b": b_DV,
        "filters": rule.conv_C1K,
        "A_log": rule.A_log,
        "dt_bias": rule.dt_bias,
        "conv_pool": conv_pool,
        "pool": state_pool,
        "qkv_row": qkv_DC.stride(0),
        "a_row": a_DV.stride(0),
        "b_row": b_DV.stride(0),
        "conv_row": conv_pool.stride(0),
        "pool_row": state_pool.stride(0),
        "scale": dk**-0.5,
        "eps": EPS,
        "H": key_heads,
        "V": heads,
        "DK": dk,
        "DV": dv,
        "K": rule.conv_C1K.shape[2],
        "BK": power_of_two(dk),
    }


def _check(qkv: Tensor, z: Tensor, rule: Rule, conv_pool: Tensor, state_pool: Tensor) -> None:
    (heads, dv), (_, dk) = rule.values, rule.keys
    channels, _, taps = rule.conv_C1K.shape
    assert qkv.shape[1] == channels, "one filter for each channel"
    assert qkv.stride(1) == 1, "channels must be contiguous"
    assert z.stride()[1:] == (dv, 1), "heads of a token must follow one another"
    assert rule.conv_C1K.is_contiguous(), "the filters must be contiguous"
    assert conv_pool.shape[1:] == (channels, taps - 1), "the pool of histories is [slots, C, K-1]"
    assert state_pool.shape[1:] == (heads, dk, dv), "the pool of states is [slots, V, k, v]"
    assert conv_pool[0].is_contiguous(), "a history must be contiguous"
    assert state_pool[0].is_contiguous(), "a state must be contiguous"


@jit
def channels(h, i, j, H: tl.constexpr, V: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Return which channels are q i, k i and v j of value head h."""
    q_c = h // (V // H) * DK + i
    return q_c, q_c + H * DK, 2 * H * DK + h * DV + j


@jit
def head_before(filters, history, at, keys, columns, K: tl.constexpr):
    """Return `taps_before` of the channels at = (q, k, v): the convolution's past."""
    q_past = taps_before(filters, history, at[0], keys, K)
    k_past = taps_before(filters, history, at[1], keys, K)
    return q_past, k_past, taps_before(filters, history, at[2], columns, K)


@jit
def head_inputs(x, row, at, keys, columns, EACH: tl.constexpr):
    """Return tuples of q, k and v of the tokens, not widened; x: where those of the first lie."""
    q_x, k_x = loaded(x + at[0], keys, row, EACH), loaded(x + at[1], keys, row, EACH)
    return q_x, k_x, loaded(x + at[2], columns, row, EACH)


@jit
def head_window(past, inputs):
    """Return the inputs of q, k and v, those before the tokens first, in float32."""
    window = ()
    for x in tl.static_range(3):
        window += (past[x][1] + widened(inputs[x]),)  # type: ignore[assignment]
    return window


@jit
def head_convolved(past, window, y, token: tl.constexpr, K: tl.constexpr):
    """Return q, k and v of one token, convolved.

    All tokens at once would fill the registers: each is spread over the rows of a state.
    """
    heads = ()
    for x in tl.static_range(3):
        weights, _, older = past[x]
        heads += (convolved(window[x], weights, older, y, token, K),)  # type: ignore[assignment]
    return heads


@jit
def normed(o_v, z_v, w_v, norm, y, eps, DV: tl.constexpr):
    """Return the gated norm of a head in the dtype of `y`, which o is rounded to first."""
    o_v = o_v.to(y.dtype.element_ty).to(tl.float32)
    root = tl.rsqrt(tl.sum(o_v * o_v, 0) / DV + eps)
    return gated_norm(o_v, z_v.to(tl.float32), w_v, root, norm, y).to(y.dtype.element_ty)
