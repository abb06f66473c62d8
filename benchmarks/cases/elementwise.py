"""Cases of the convolution, the norms, the rotation and the other kernels that only move bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.cases.setting import (
    BITS,
    EPS,
    ONCE,
    SEVERAL,
    Bound,
    Case,
    Part,
    Setting,
    poisoned,
    size,
)
from runtime.kernels.attention import reference as attention
from runtime.kernels.attention import rope, write
from runtime.kernels.delta_rule import conv1d
from runtime.kernels.delta_rule import conv1d_step as step
from runtime.kernels.encode import rows
from runtime.kernels.linear import mlp
from runtime.kernels.norm import gated, rms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

THETA, ROTARY, SECTIONS, TAPS = 1e7, 64, (11, 11, 10), 4
# nearly all bits: a sum next to a tie may round the other way, which silu widens up to four times
CONV = Bound(1e-4, atol=1e-6, rtol=2**-5)


def conv1d_prefill(s: Setting, lengths: Sequence[int]) -> Case:
    """Return packed sequences through the convolution."""
    x, weight = s.normal(sum(lengths), sum(s.widths)), s.normal(sum(s.widths), 1, TAPS)
    whole = s.normal(len(lengths) + 4, sum(s.widths), TAPS - 1)
    args = s.slots(len(lengths)), s.bounds(lengths)
    call = partial(conv1d.conv1d_prefill, x, weight, whole[1:], *args)

    def check() -> list[Part]:
        pool = whole.clone()
        expected = conv1d.conv1d_prefill_reference(x, weight, pool[1:], *args)
        return [Part("y", poisoned(call), expected, CONV), Part("pool", whole, pool, BITS)]

    return Case(call, check, 2 * size(x))


def conv1d_step(s: Setting, batch: int) -> Case:
    """Return one token of each sequence through the convolution; prefill gives the same bits."""
    x, weight = s.normal(batch, sum(s.widths)), s.normal(sum(s.widths), 1, TAPS)
    whole, slots = s.normal(batch + 4, sum(s.widths), TAPS - 1), s.slots(batch)
    call = partial(step.conv1d_step, x, weight, whole[1:], slots)

    def check() -> list[Part]:
        pool, prefilled = whole.clone(), whole.clone()
        expected = step.conv1d_step_reference(x, weight, pool[1:], slots)
        bounds, used = s.bounds([1] * batch), slots >= 0
        same = conv1d.conv1d_prefill(x, weight, prefilled[1:], slots, bounds)
        got = poisoned(call)
        return [
            Part("y", got, expected, CONV),
            Part("prefill", got[used], same[used], BITS),
            Part("pool", whole, pool, BITS),
        ]

    return Case(call, check, 2 * size(x) + 2 * size(whole[:batch]) + size(weight))


def rms_norm(s: Setting, tokens: int) -> Case:
    """Return the zero-centred norm of the residual stream."""
    x, w = s.normal(tokens, s.hidden), s.normal(s.hidden)
    call = partial(rms.rmsnorm, x, w, EPS)

    def check() -> list[Part]:
        expected = rms.rmsnorm_reference(x.double(), w.double(), EPS)
        return [Part("y", poisoned(call), expected, ONCE)]

    return Case(call, check, 2 * size(x))


def add_rms_norm(s: Setting, tokens: int) -> Case:
    """Return the same with the residual add."""
    x, residual, w = s.normal(tokens, s.hidden), s.normal(tokens, s.hidden), s.normal(s.hidden)
    call = partial(rms.add_rmsnorm, x, residual, w, EPS)

    def check() -> list[Part]:
        y, total = poisoned(call)
        expected = rms.rmsnorm_reference((x + residual).double(), w.double(), EPS)
        return [Part("y", y, expected, ONCE), Part("total", total, x + residual, BITS)]

    return Case(call, check, 4 * size(x))


def gated_rms_norm(s: Setting, tokens: int) -> Case:
    """Return the gated norm; z is the tail of what one linear gives."""
    o = s.normal(tokens, s.value_heads, s.d)
    z = s.normal(tokens, sum(s.widths) + s.widths[2])[:, -s.widths[2] :].unflatten(1, (-1, s.d))
    w = s.normal(s.d, dtype=torch.float32)
    call = partial(gated.gated_rmsnorm, o, z, w, EPS)

    def check() -> list[Part]:
        expected = gated.gated_rmsnorm_reference(*(x.double() for x in (o, z, w)), EPS)
        return [Part("y", poisoned(call), expected, SEVERAL)]

    return Case(call, check, 3 * size(o))


def rope_cos_sin(s: Setting, tokens: int) -> Case:
    """Return float32 angles of three positions a token; 2^-22 of a cosine are four steps."""
    positions = torch.randint(0, 8192, (3, tokens), device=s.device)
    call = partial(rope.rope_cos_sin, positions, ROTARY, THETA, SECTIONS)

    def check() -> list[Part]:
        frequency, axis = rope.frequencies(ROTARY, THETA, SECTIONS, positions.device)
        angle = (positions.T[:, axis.long()].float() * frequency).double()
        cos, sin = poisoned(call)
        bound = Bound(atol=2**-22)
        return [Part("cos", cos, angle.cos(), bound), Part("sin", sin, angle.sin(), bound)]

    return Case(call, check, size(positions) + 4 * tokens * ROTARY)


def _rotation(s: Setting, tokens: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    qg = s.normal(tokens, s.heads * 2 * s.head_dim)
    q, _ = attention.split_query_gate(qg, s.heads, s.head_dim)
    positions = torch.randint(0, 8192, (3, tokens), device=s.device)
    rotary = min(ROTARY, s.head_dim)
    angles = rope.rope_cos_sin_reference(positions, rotary, THETA, SECTIONS, s.dtype)
    return q, s.normal(tokens, s.kv_heads, s.head_dim), angles


def norm_rope_write(s: Setting, tokens: int) -> Case:
    """Return tokens in three slots, the fourth and every seventh after it padding; q is a view."""
    (q, k, angles), weights = _rotation(s, tokens), (s.normal(s.head_dim), s.normal(s.head_dim))
    v, shape = s.normal(tokens, s.kv_heads, s.head_dim), (4, s.places, s.kv_heads, s.head_dim)
    wholes = s.normal(*shape), s.normal(*shape)
    at = torch.randperm(3 * s.places)[:tokens].to(s.device)
    slots, places = (at // s.places).int(), (at % s.places).int()
    slots[3::7] = -1
    inputs = q, k, v, *weights, *angles
    pools = [whole[1:] for whole in wholes]
    call = partial(write.norm_rope_write, *inputs, EPS, *pools, slots, places)

    def check() -> list[Part]:
        expected = [whole.double() for whole in wholes]
        q_expected = write.norm_rope_write_reference(
            *(x.double() for x in inputs), EPS, *(pool[1:] for pool in expected), slots, places
        )
        written = torch.zeros(shape[:2], dtype=torch.bool, device=s.device)
        written[1 + slots[slots >= 0].long(), places[slots >= 0].long()] = True
        before = wholes[0][~written]
        return [
            Part("q", poisoned(call), q_expected, SEVERAL),
            Part("k", wholes[0][written], expected[0][written], SEVERAL),
            Part("v", wholes[1], expected[1].to(s.dtype), BITS),
            Part("untouched", wholes[0][~written], before, BITS),
        ]

    return Case(call, check, 2 * size(q, k, v))


def silu_mul(s: Setting, tokens: int) -> Case:
    """Return silu(gate) * up."""
    both = s.normal(tokens, 2 * s.inner)
    call = partial(mlp.silu_mul, both)

    def check() -> list[Part]:
        return [Part("y", poisoned(call), mlp.silu_mul_reference(both.double()), SEVERAL)]

    return Case(call, check, size(both) * 1.5)


def quantise_rows(s: Setting, tokens: int, group: int | None) -> Case:
    """Return rows of very different sizes in E4M3, one group of zeros among them."""
    x = (s.normal(tokens, s.hidden).float() * torch.exp2(4 * s.normal(tokens, 1).float())).to(
        s.dtype
    )
    x[tokens // 2, : group or s.hidden] = 0
    columns = group or s.hidden
    call = partial(rows.quantize_rows, x, columns)

    def check() -> list[Part]:
        codes, scale = poisoned(call)
        expected_codes, expected_scale = rows.quantize_rows_reference(x, columns)
        return [
            Part("codes", codes, expected_codes, BITS),
            Part("scale", scale, expected_scale, BITS),
        ]

    return Case(call, check, size(x) * 1.5)
