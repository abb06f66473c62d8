"""Inverse frequencies of the rotary embedding, plain and scaled for longer contexts.

Chosen for: every batch, once for all layers, by rope.

    default   f_i = theta^(-2i / rd)
    linear    f_i / factor
    yarn      f_i where a pair turns more than beta_fast times in the original context,
              f_i / factor where it turns less than beta_slow times, and a ramp between the two;
              cosines and sines are multiplied by attention_factor

The reference and the kernel take the same numbers from here. Planning asks `check_rope` of this
module, so torch is loaded only to compute.

Source: transformers' `modeling_rope_utils` at 5.24, operation by operation: its float32 roundings
are kept. Other kinds change with the length of what is read, or have factors of their own for every
pair; they are refused.

Shape letter: r rd/2 frequencies.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.family.rope import ATTENTION, FACTOR, ORIGINAL, YARN

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from formats.family.rope import Rope, Scaling


@lru_cache(maxsize=8)
def frequencies(
    rd: int,
    theta: float,
    sections: tuple[int, int, int] | None,
    device: torch.device,
    scaling: Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (frequency, axis) of each pair: [r] float32 and [r] int32, 0 time, 1 height, 2 width.

    Computed on the CPU, where every caller gets the same bits, and kept on `device`. A CUDA graph
    must not be the first to ask.
    """
    import torch

    axis = torch.zeros(rd // 2, dtype=torch.int32)
    if sections is not None:
        axis[1 : 3 * sections[1] : 3] = 1
        axis[2 : 3 * sections[2] : 3] = 2
    base_r = theta ** (torch.arange(0, rd, 2, dtype=torch.int64).float() / rd)
    frequency_r = 1.0 / base_r if scaling is None else SCALED[scaling.kind](base_r, theta, scaling)
    return frequency_r.to(device), axis.to(device)


def attention_factor(scaling: Scaling | None) -> float:
    """Return what cosines and sines are multiplied by."""
    return float(scaling[ATTENTION]) if scaling is not None and scaling.kind == YARN else 1.0


def check_rope(rope: Rope) -> None:
    """Raise FormatError for a kind that is not computed here."""
    if rope.scaling is not None and rope.scaling.kind not in SCALED:
        raise FormatError(
            f"config.json: rope_type {rope.kind!r}",
            "is not computed by the embedded runtime",
            ", ".join(map(repr, ("default", *SCALED))),
            "convert and verify up to level tensors need no rope; for text, take transformers",
        )


def _linear(base_r: Tensor, _theta: float, scaling: Scaling) -> Tensor:
    frequency_r: Tensor = 1.0 / base_r
    return frequency_r / scaling[FACTOR]


def _yarn(base_r: Tensor, theta: float, scaling: Scaling) -> Tensor:
    kept_r = 1 - _ramp(theta, len(base_r), scaling)
    near_r: Tensor = 1.0 / base_r
    far_r: Tensor = 1.0 / (scaling[FACTOR] * base_r)
    return far_r * (1 - kept_r) + near_r * kept_r


def _ramp(theta: float, r: int, scaling: Scaling) -> Tensor:
    """Return [r] 0 where a frequency stays, 1 where it is divided, and what lies between."""
    import torch

    low, high = (
        2 * r * log(scaling[ORIGINAL] / (scaling[beta] * 2 * pi)) / (2 * log(theta))
        for beta in ("beta_fast", "beta_slow")
    )
    if scaling["truncate"]:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, 2 * r - 1)
    if low == high:
        high += 0.001
    return torch.clamp((torch.arange(r, dtype=torch.float32) - low) / (high - low), 0, 1)


SCALED: dict[str, Callable[[Tensor, float, Scaling], Tensor]] = {"linear": _linear, YARN: _yarn}
