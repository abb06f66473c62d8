"""The comparison of outputs with their references, in float64; a NaN never passes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cases.setting import BITS, Bound, Part

if TYPE_CHECKING:
    from torch import Tensor


def verdict(parts: list[Part]) -> dict[str, Any]:
    """Return the figures of the output that is nearest to its tolerance, or beyond."""
    found = [_figures(part) for part in parts]
    failed = [figures["worst"] for figures in found if figures["used"] > 1]
    worst = max(found, key=lambda figures: figures["used"])
    del worst["used"]
    return worst | {"passed": not failed, "failed": failed}


def _figures(part: Part) -> dict[str, Any]:
    """Return the errors of an output; `used` says how much of its bound they take, 1 is all."""
    got, expected = part.got, part.expected
    assert got.shape == expected.shape, f"{part.name} is {got.shape}, not {expected.shape}"
    difference = (got.double() - expected.double()).abs()
    rms = (difference.norm() / expected.double().norm()).item()
    if part.bound == BITS:
        used = 0.0 if torch.equal(_bytes(got), _bytes(expected.to(got.dtype))) else math.inf
    else:
        used = _used(part.bound, rms, difference, expected.double().abs())
    return {
        "worst": part.name,
        "max_abs": difference.max().item(),
        "relative_rms": rms,
        "tolerance": tolerance(part.bound),
        "used": used,
    }


def _used(bound: Bound, rms: float, difference: Tensor, sizes: Tensor) -> float:
    used = [] if bound.relative_rms is None else [rms / bound.relative_rms]
    if bound.atol is not None:
        used.append((difference / (bound.atol + bound.rtol * sizes)).max().item())
    return max(math.inf if math.isnan(x) else x for x in used)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def tolerance(bound: Bound) -> str:
    """Return a bound as a reader writes it."""
    words = [] if bound.relative_rms is None else [f"relative rms {bound.relative_rms:g}"]
    if bound.atol is not None:
        words.append(f"{bound.atol:.3g} + {bound.rtol:.3g} |x|")
    return ", ".join(words) or "bits"
