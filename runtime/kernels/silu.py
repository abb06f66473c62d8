"""The gate of feed-forwards, norms and convolutions, and rounding, in few instructions.

Chosen for: never alone; linear.mlp, norm.gated, norm.pieces and delta_rule.conv1d share it.

    sigmoid(x) = 1 / (1 + 2^(-x log2 e))            silu(x) = x * sigmoid(x)

Both steps are the approximations of the hardware, good to 2^-22: `tl.sigmoid` takes the same ones,
and eight instructions more for what lies beyond their range. Here a power beyond float32 is
infinite, and one below its normal numbers zero: the result is 0 or 1, as it has to be. H200, 8192
tokens of 27B, us: silu(gate) * up in codes 165 for 177, the convolution 97 for 102, the gated norm
65 for 77.
"""

from __future__ import annotations

from runtime.kernels.launch import INTERPRET, jit, tl


@jit
def sigmoid(x):
    """Return the sigmoid of float32 numbers."""
    if INTERPRET:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def rounded(x, like):
    """Return float32 numbers rounded to the dtype of the pointer `like`, in float32.

    To bfloat16 by pairs: a conversion of one number alone takes as long as a power.
    """
    if INTERPRET or like.dtype.element_ty != tl.bfloat16:
        return x.to(like.dtype.element_ty).to(tl.float32)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;
        }""",
        "=f,=f,f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@jit
def silu_times(gate, up, like):
    """Return silu(gate) * up, each step rounded to the dtype of the pointer `like`.

    The compiler multiplies what it has just rounded by pairs, too, if nothing stands between.
    """
    gate = gate.to(like.dtype.element_ty).to(tl.float32)
    silu = (gate * sigmoid(gate)).to(like.dtype.element_ty)
    product = silu.to(tl.float32) * up.to(like.dtype.element_ty).to(tl.float32)
    return product.to(like.dtype.element_ty)
