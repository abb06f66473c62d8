"""E2M1 codes and whole numbers, in plain torch: what the loops are held to, to the byte.

    E2M1   0 .5 1 1.5 2 3 4 6 and their negatives, nearest, ties to the even code; 6 is the end

Shape letters: B groups of g weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = E2M1[-1]
SIGN = 8


def encode_e2m1(w_Bg: Tensor, d_B: Tensor) -> Tensor:
    """Return the codes nearest to w / d, uint8 [B, g]."""
    w = w_Bg.float()
    y = w.abs() / d_B[:, None]
    values = torch.tensor(E2M1)
    ties = (values[1:] + values[:-1]) / 2
    odd = torch.arange(len(ties)) % 2 == 1  # from an odd code a tie goes up, to the even one
    passed = torch.where(odd, y[..., None] >= ties, y[..., None] > ties)
    return passed.sum(-1).byte() | (w.signbit() * SIGN).byte()


def decode_e2m1(codes_Bg: Tensor, d_B: Tensor) -> Tensor:
    """Return the values of codes times d, float32 [B, g]."""
    both = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return both[codes_Bg.long()] * d_B[:, None]


def pack(codes_Bg: Tensor) -> Tensor:
    """Return two codes to a byte, uint8 [B, g / 2]: the even column in the low half."""
    return codes_Bg[:, ::2] | (codes_Bg[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes of packed ones, uint8 [B, g]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def encode_int(w_Bg: Tensor, d_B: Tensor, zero_B: Tensor, bits: int) -> Tensor:
    """Return round(w / d + zero) within so many bits, int8 [B, g]."""
    end = 1 << (bits - 1)
    y = w_Bg.float() / d_B[:, None] + zero_B[:, None]
    return y.clamp(-end, end - 1).round().to(torch.int8)


def decode_int(codes_Bg: Tensor, d_B: Tensor, zero_B: Tensor) -> Tensor:
    """Return (codes - zero) * d, float32 [B, g]."""
    return (codes_Bg.float() - zero_B[:, None]) * d_B[:, None]
