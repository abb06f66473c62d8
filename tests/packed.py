"""Weights as GPTQ, AWQ, AutoRound and compressed-tensors pack them, written out by hand.

`tests/quant/fourbit/test_qweight.py` holds the packing to the bytes of the real packers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight columns


@dataclass(frozen=True)
class Codes:
    """Whole numbers of so many bits: codes [N, K] and zeros [N, G] from 0 on, steps [N, G]."""

    codes: Tensor
    zeros: Tensor
    steps: Tensor
    groups: Tensor
    bits: int

    @property
    def values(self) -> Tensor:
        """What they mean, float64."""
        zeros, steps = self.zeros[:, self.groups], self.steps.double()[:, self.groups]
        return (self.codes - zeros) * steps


def nearest(w: Tensor, bits: int = 4, group: int = 32, *, symmetric: bool, order: bool = False):
    """Return codes near a weight; `order`: the groups of columns do not follow one another."""
    k = w.shape[1]
    columns = torch.arange(k)
    groups = ((columns * 37 + 5) % k if order else columns) // group
    together = groups.argsort(stable=True)
    cut = w.float()[:, together].unflatten(1, (-1, group))
    low, high = cut.amin(-1).clamp(max=0), cut.amax(-1).clamp(min=0)
    top = 2**bits - 1
    steps = 2 * torch.maximum(high, -low) / top if symmetric else (high - low) / top
    steps = steps.to(torch.bfloat16).float().clamp(min=2.0**-20)
    half = torch.full_like(steps, 2 ** (bits - 1))
    zeros = half if symmetric else (-low / steps).round().clamp(1, top)
    codes = (w.float() / steps[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return Codes(codes.long(), zeros.long(), steps, groups, bits)


def words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return codes [R, n C] packed along their columns, int32 [R, C]."""
    count = 32 // bits
    shifts = torch.tensor(places or range(count)) * bits
    return (codes.unflatten(1, (-1, count)) << shifts).sum(-1).to(torch.int32)


def gptq(base: str, x: Codes, *, v2: bool = False, scales=torch.float16, g_idx: bool = True):
    """Return the tensors of one weight; `base` ends in a dot."""
    zeros = x.zeros.T if v2 else x.zeros.T - 1
    stored = {
        "qweight": words(x.codes, x.bits).T,
        "qzeros": words(zeros, x.bits),
        "scales": x.steps.T.to(scales),
    } | ({"g_idx": x.groups.to(torch.int32)} if g_idx else {})
    return {base + key: value.contiguous() for key, value in stored.items()}


def awq(base: str, x: Codes, scales=torch.float16):
    stored = {
        "qweight": words(x.codes.T, x.bits, AWQ),
        "qzeros": words(x.zeros.T, x.bits, AWQ),
        "scales": x.steps.T.to(scales),
    }
    return {base + key: value.contiguous() for key, value in stored.items()}


def compressed(base: str, x: Codes, *, symmetric: bool, order: bool = False, scales=torch.bfloat16):
    stored = {
        "weight_packed": words(x.codes, x.bits),
        "weight_scale": x.steps.to(scales),
        "weight_shape": torch.tensor(x.codes.shape),
    }
    stored |= {} if symmetric else {"weight_zero_point": words(x.zeros.T, x.bits).T}
    stored |= {"weight_g_idx": x.groups.to(torch.int32)} if order else {}
    return {base + key: value.contiguous() for key, value in stored.items()}


def int_quantized(base: str, x: Codes, *, symmetric: bool, scales=torch.bfloat16):
    half = 2 ** (x.bits - 1)
    stored = {
        "weight": (x.codes - half).to(torch.int8),
        "weight_scale": x.steps.to(scales),
    } | ({} if symmetric else {"weight_zero_point": (x.zeros - half).to(torch.int8)})
    return {base + key: value.contiguous() for key, value in stored.items()}
