"""Rows of weights of the kinds that encoders have trouble with: (rows, columns, generator)."""

from __future__ import annotations

import torch


def normal(n, k, draw):
    return torch.randn(n, k, generator=draw) * 0.02


def heavy_tailed(n, k, draw):
    """Student's t with two degrees of freedom: outliers of every size."""
    chi = sum(torch.randn(n, k, generator=draw) ** 2 for _ in range(2)) / 2
    return normal(n, k, draw) / chi.sqrt().clamp(min=1e-3)


def one_outlier(n, k, draw):
    w = normal(n, k, draw)
    w[:, int(torch.randint(k, (), generator=draw))] *= 1000
    return w
