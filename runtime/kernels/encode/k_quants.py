"""Q4_K and Q6_K on the GPU: to the byte what the CPU's encoder, and so ggml's C, writes.

Chosen for: `convert --device cuda` to Q4_K or Q6_K. No layer of a model uses it.

    Q4_K   w ~ d l q - e m        8 blocks of 32 columns with l and m to a super-block with d and e
    Q6_K   w ~ d l q              16 blocks of 16 columns with l to a super-block with d

`quant.ggml.k_lines` and `quant.ggml.k_steps` have the searches. Here one thread has a block's
columns in its registers and adds them up in their order, like a lane there; then threads side by
side round a super-block's scales, and rows are read again, coalesced, for the codes of what is
stored.

Traps: bytes are equal only if products and sums are not fused (`enable_fp_fusion=False`) and
division and root round to nearest (`div_rn`, `sqrt_rn`). A GPU's NaN has other bits than a CPU's,
which ggml's rounding trick would show: hence an infinite slope becomes 0, from which follow the
same codes, all 0. Codes become floats by their bits: a conversion takes eight times as long.

Shape letters: N rows, K columns, B super-blocks of 256 columns; in kernels S super-blocks of a
program, P pairs of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.encode.q4_k import encode_q4_k_kernel
from runtime.kernels.encode.q6_k import encode_q6_k_kernel
from runtime.kernels.launch import use_triton

if TYPE_CHECKING:
    from torch import Tensor

SUPER = 256
SUPER_BYTES = {"Q4_K": 144, "Q6_K": 210}
NUM_BLOCKS = 128  # of a program: one to a thread


def encode_k_reference(name: str, w_NK: Tensor) -> Tensor:
    """Say what `encode_k` computes: the blocks of `quant.ggml.k_quants`."""
    from quant.ggml.k_quants import encode_rows

    halves = w_NK.dtype == torch.bfloat16
    w = w_NK.detach().cpu() if halves else w_NK.detach().cpu().float()
    out = torch.empty(_shape(name, w_NK), dtype=torch.uint8)
    bits = w.contiguous().view(torch.uint16) if halves else w.contiguous()
    encode_rows(name, bits.numpy(), None, out.numpy())
    return out.to(w_NK.device)


def encode_k(name: str, w_NK: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the super-blocks of a weight, uint8 [N, row_bytes].

    name        "Q4_K" or "Q6_K"
    w_NK        [N, K] float, contiguous and finite; K a multiple of 256
    importance  None
    """
    assert importance is None, f"{name} is encoded without an importance"
    assert w_NK.shape[1] % SUPER == 0, f"rows of {w_NK.shape[1]} are no super-blocks"
    if not use_triton(w_NK):
        return encode_k_reference(name, w_NK)
    assert w_NK.is_contiguous(), "super-blocks must follow each other"
    out = torch.empty(_shape(name, w_NK), dtype=torch.uint8, device=w_NK.device)
    kernel, size = (
        (encode_q4_k_kernel, NUM_BLOCKS // 8)
        if name == "Q4_K"
        else (encode_q6_k_kernel, NUM_BLOCKS // 16)
    )
    num_super = w_NK.numel() // SUPER
    if num_super:
        grid = (-(-num_super // size),)
        kernel[grid](w_NK, out, num_super, S=size, num_warps=4, enable_fp_fusion=False)
    return out


def _shape(name: str, w_NK: Tensor) -> tuple[int, int]:
    return w_NK.shape[0], w_NK.shape[1] // SUPER * SUPER_BYTES[name]
