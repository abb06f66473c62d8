"""The error of a weight or a recipe that cannot be quantised as asked."""

from __future__ import annotations

from formats.errors import Qwen35Error

RESTORE_SCALE = "restore the scale, or convert the BF16 checkpoint"


class QuantError(Qwen35Error):
    """The request cannot be quantised, or the result would be wrong."""
