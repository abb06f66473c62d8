"""The scales of an FP8 cache, computed from what a text brings to the cache.

    scale = amax / 448, in bfloat16      amax of one layer's keys or values, over all tokens

Keys are those that engines cache: normed and rotated. The forward pass is float32. A layer whose
keys or values are all 0 gets a scale of 1.

Source: compressed-tensors' `calculate_qparams` and llm-compressor's `kv_cache_scheme`, which stores
bfloat16 too. Sums in another order, on another machine, mostly end in the same bfloat16.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from formats.family.cache_scales import SCALED
from quant.errors import QuantError
from runtime.kernels.attention.fp8_cache import LARGEST


@dataclass
class CacheAmax:
    """The largest key and value of each attention, by magnitude; NaN if there is one."""

    largest: dict[str, Tensor] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, attention: str, keys: Tensor, values: Tensor) -> None:
        """Take the keys and values of a group of texts."""
        amax = torch.stack([keys.abs().amax(), values.abs().amax()]).float().cpu()
        with self.lock:
            self.largest[attention] = amax.maximum(self.largest.get(attention, amax))

    def scales(self) -> dict[str, dict[str, Tensor]]:
        """Return the scale, bfloat16 [1], by attention and by what it scales.

        QuantError if some key or value is NaN or infinite.
        """
        return {
            attention: dict(zip(SCALED, _scales(attention, amax), strict=True))
            for attention, amax in self.largest.items()
        }


def _scales(attention: str, amax: Tensor) -> Sequence[Tensor]:
    if not bool(amax.isfinite().all()):
        raise QuantError(attention, "has keys or values that are NaN or infinite", "numbers")
    smallest = torch.finfo(torch.bfloat16).tiny
    scale = torch.where(amax > 0, (amax / LARGEST).clamp_min(smallest), 1.0)
    return torch.split(scale.to(torch.bfloat16), 1)
