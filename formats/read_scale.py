"""The value of a scale that is one number, such as that of an FP8 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor


def read_scale(checkpoint: Checkpoint, stored: str) -> Tensor:
    """Return a scale. FormatError if it is more than one number, or none."""
    scale = checkpoint.load(stored, checkpoint.read(stored), ...)
    if scale.numel() != 1 or not scale.is_floating_point():
        got = f"is {checkpoint.infos()[stored].dtype} of shape {list(scale.shape)}"
        raise FormatError(stored, got, "one number: the scale of a layer's cache")
    return scale
