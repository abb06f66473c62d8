"""Weights in each stored form, and how far a product is from another, for tests of few rows."""

from __future__ import annotations

import torch

from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.norm.gated import Unscaled

STORED = ["plain", "block", "channel"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(n, k, stored, seed=0):
    w = normal(n, k, seed=seed) / k**0.5
    if stored == "plain":
        return w
    grid = (-(-n // 128), -(-k // 128)) if stored == "block" else (n, 1)
    codes = (w * 400).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.exp(normal(*grid, seed=seed + 1)) / 400)


def unscaled(rows, heads, d):
    """Return rows whose heads are still to be scaled, their squares in three parts."""
    squares = normal(rows, heads, 3, seed=7).square() * d
    return Unscaled(normal(rows, heads * d, seed=6), squares, d, 1e-6)


def distance(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()
