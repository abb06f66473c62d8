"""How deeply an artifact is verified: its headers, all values, what the model says of a text."""

from __future__ import annotations

LEVELS = ("structure", "tensors", "logits")
STRUCTURE, TENSORS, LOGITS = LEVELS
