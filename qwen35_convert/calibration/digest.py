"""A digest of tensors, and of what is done with them, one after another.

Of a matrix on a GPU each row is folded there first, into the sum of its bits times odd numbers: it
changes with any one of them, and a layer of experts has gigabytes that need not leave the GPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ODD = 0x1E3779B97F4A7C15  # its multiples have bits in all places
ROWS = 1024  # folded at once


class Digest:
    """SHA-256 of what was added, in its order."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, values: Tensor) -> None:
        """Add float32 numbers."""
        if values.is_cuda and values.dim() == 2:
            values = folded(values)
        self._sha256.update(values.contiguous().cpu().numpy().data)

    def say(self, what: str) -> None:
        """Add a word: what is done in another way than before says another."""
        self._sha256.update(what.encode())

    def hexdigest(self) -> str:
        """Return the digest."""
        return self._sha256.hexdigest()


def folded(values_NK: Tensor) -> Tensor:
    """Return of each row the sum of its bits, each times an odd number, int64 [N]."""
    import torch

    odd = (2 * torch.arange(values_NK.shape[1], device=values_NK.device) + 1) * ODD
    bits = values_NK.contiguous().view(torch.int32)
    return torch.cat([(rows * odd).sum(1) for rows in torch.split(bits, ROWS)])
