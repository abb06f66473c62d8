"""E2M1 codes, whole numbers and GPTQ, in plain torch: what the loops are held to, to the byte.

    E2M1   0 .5 1 1.5 2 3 4 6 and their negatives, nearest, ties to the even code; 6 is the end

A *unit* is a decoded weight over its step: an E2M1 value, or code - zero of a whole number.

Shape letters: B groups of g weights; N rows, K columns of a weight.
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


def round_units(w: Tensor, d: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the units nearest to w / d, float32.

    bits  of whole numbers; 0: E2M1
    """
    if bits:
        end = 1 << (bits - 1)
        return (w / d + zero).clamp(-end, end - 1).round() - zero
    codes = encode_e2m1((w / d).reshape(1, -1), torch.ones(1))
    return decode_e2m1(codes, torch.ones(1)).view(w.shape)


def feed_back(w_NK: Tensor, d_NK: Tensor, zero_NK: Tensor, upper_KK: Tensor, bits: int) -> Tensor:
    """Return the units that GPTQ chooses, float32 [N, K], all columns in the factor's order.

    Column by column the nearest unit is taken, and its error moved into the columns after it.
    """
    w, units = w_NK.clone(), torch.empty_like(w_NK)
    for j in range(w.shape[1]):
        units[:, j] = round_units(w[:, j], d_NK[:, j], zero_NK[:, j], bits)
        missed = (w[:, j] - units[:, j] * d_NK[:, j]) / upper_KK[j, j]
        w[:, j + 1 :] -= missed[:, None] * upper_KK[j, j + 1 :]
    return units
