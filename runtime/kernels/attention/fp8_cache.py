"""Keys and values as a cache in FP8 gives them back.

Chosen for: every layer whose checkpoint has scales for an FP8 cache, before keys are kept.

    codes = round_to_e4m3(clamp(x / scale, -448, 448))        x' = codes * scale

with one scale for all keys of a layer and one for all its values. The pools keep x' in the model
dtype: attention reads the values that an engine's FP8 cache holds, from as much memory as ever.
E4M3 has 3 bits of mantissa, so rounding x' to bfloat16 and rounding a second time change no code.

Source: vLLM's `reshape_and_cache_flash` at 0.33, which divides by the scale, saturates and rounds
to the nearest code.
Trap: torch's cast makes NaN of what exceeds 448; engines saturate.

Shape letters: T packed tokens, m key heads, d head size, S slots, L tokens a slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return x as E4M3 codes of this scale, a number in float32, give it back."""
    codes = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


@dataclass(frozen=True)
class Fp8Cache:
    """The scales of one layer's keys and values, float32 [] on the model's device."""

    key_scale: Tensor
    value_scale: Tensor

    def round(self, pool_k: Tensor, pool_v: Tensor, slots_T: Tensor, places_T: Tensor) -> None:
        """Round what has just been written at these places; the pools [S, L, m, d] change in place.

        A slot below 0 is padding: it means some other cell, whose content is unused or is rounded
        already, which rounding leaves as it is.
        """
        at = slots_T.long(), places_T.long()
        pool_k[at] = rounded(pool_k[at], self.key_scale)
        pool_v[at] = rounded(pool_v[at], self.value_scale)
