"""Four and eight bits on the CPU: `reference` again, to the byte, by the compiled loops.

Weights are cut into groups of g columns: [N, K] -> [B, g]. A tensor elsewhere is taken to the CPU.

Shape letters: N rows, K columns, B groups of g weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quant.fourbit import loops
from quant.fp8.cpu import bits
from quant.fp8.reference import check_finite

if TYPE_CHECKING:
    from torch import Tensor


def grouped(w_NK: Tensor, group: int) -> Tensor:
    """Return the groups of a weight's rows, [B, g]."""
    return w_NK.cpu().contiguous().reshape(-1, group)


def extremes(w_NK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest weight, and 0, of each group, float32 [B].

    QuantError if a weight is not finite.
    """
    w_Bg = grouped(w_NK, group)
    low, high = torch.empty(len(w_Bg)), torch.empty(len(w_Bg))
    if not loops.extremes(bits(w_Bg), low.numpy(), high.numpy()):
        check_finite(w_NK.float())
    return low, high


def encode_e2m1(w_Bg: Tensor, d_B: Tensor) -> Tensor:
    """Return packed codes, uint8 [B, g / 2]."""
    out = torch.empty(len(w_Bg), w_Bg.shape[1] // 2, dtype=torch.uint8)
    loops.encode_e2m1(bits(w_Bg), d_B.numpy(), out.numpy())
    return out


def decode_e2m1(packed: Tensor, d_B: Tensor) -> Tensor:
    """Return values, float32 [B, g]."""
    out = torch.empty(len(packed), packed.shape[1] * 2)
    loops.decode_e2m1(packed.numpy(), d_B.numpy(), out.numpy())
    return out


def encode_int(w_Bg: Tensor, d_B: Tensor, zero_B: Tensor, width: int) -> Tensor:
    """Return whole numbers of so many bits, int8 [B, g]."""
    end = 1 << (width - 1)
    out = torch.empty(w_Bg.shape, dtype=torch.int8)
    loops.encode_int(bits(w_Bg), d_B.numpy(), zero_B.numpy(), -end, end - 1, out.numpy())
    return out


def decode_int(codes_Bg: Tensor, d_B: Tensor, zero_B: Tensor) -> Tensor:
    """Return values, float32 [B, g]."""
    out = torch.empty(codes_Bg.shape)
    loops.decode_int(codes_Bg.contiguous().numpy(), d_B.numpy(), zero_B.numpy(), out.numpy())
    return out


def pack_int4(codes_NK: Tensor) -> Tensor:
    """Return codes plus 8, eight to a word, int32 [N, K / 8]."""
    out = torch.empty(codes_NK.shape[0], codes_NK.shape[1] // 2, dtype=torch.uint8)
    loops.pack_int4(codes_NK.contiguous().numpy(), out.numpy())
    return out.view(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """Return the codes of words, int8 [N, K]."""
    packed = words.cpu().contiguous().view(torch.uint8)
    out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.int8)
    loops.unpack_int4(packed.numpy(), out.numpy())
    return out
