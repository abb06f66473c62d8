"""Online softmax in tiles of keys: what the attention kernels share.

Chosen for: never alone; decode, step and prefill share it.

Source: Dao 2023 (FlashAttention-2); the gate and the rounding: see reference.

Shape letters: n query heads, m key and value heads, d head size, L tokens a slot holds.
"""

from __future__ import annotations

from runtime.kernels.launch import jit, operand, tl

LOG2_E = 1.4426950408889634


@jit
def load_tile(head, place, known, before, row, HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the keys or values [BLOCK_L, BLOCK_D] of a head at `place` where known, else `before`.

    row  elements from one place to the next
    """
    d = tl.arange(0, BLOCK_D)
    at = (place.to(tl.int64) * row)[:, None] + d[None, :]
    return tl.load(head + at, mask=known[:, None] & (d < HEAD)[None, :], other=before)


@jit
def soften(s, scale, top, total):
    """Return (weights exp2(score - top), top, total, by how much older sums shrink).

    s  [rows, places] products of queries and keys; times `scale`, above 0, they are scores
    """
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s * scale - new_top[:, None])
    return p, new_top, total * shrink + tl.sum(p, 1), shrink


@jit
def add_tile(o, top, total, q, k, v, place, end, scale):
    """Return (o, top, total) with the keys at `place`, below `end`, added: online softmax.

    o       [rows, BLOCK_D] sum of exp2(score - top) * v
    top     [rows] the largest score so far, at first a finite low; total [rows] the sum of
            exp2(score - top)
    """
    s = tl.dot(operand(q), tl.trans(operand(k)), input_precision="ieee")
    s = tl.where((place < end)[None, :], s, -float("inf"))
    p, top, total, shrink = soften(s, scale, top, total)
    o = tl.dot(operand(p.to(v.dtype)), operand(v), o * shrink[:, None], input_precision="ieee")
    return o, top, total


@jit
def gated(o, gate, y):
    """Return o * sigmoid(gate), both factors and the product rounded to the dtype of `y`."""
    dtype = y.dtype.element_ty
    weight = tl.sigmoid(gate.to(tl.float32)).to(dtype)
    return (o.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
