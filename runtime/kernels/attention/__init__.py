"""Gated attention over pools of keys and values, and the rotation before it."""
