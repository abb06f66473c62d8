"""How sizes are shown."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Return bytes in the unit that reads best: 1.35 GB."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.2f} {unit}"
    return f"{nbytes} B"


def mb_text(nbytes: int) -> str:
    """Return bytes in megabytes, rounded up: what a limit has to be."""
    return f"{-(-nbytes // 10**6)} MB"
