"""How sizes are shown, and read."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def size_text(nbytes: int) -> str:
    """Return bytes in the unit that reads best: 1.35 GB."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.2f} {unit}"
    return f"{nbytes} B"


def mb_text(nbytes: int) -> str:
    """Return bytes in megabytes, rounded up: what a limit has to be."""
    return f"{-(-nbytes // 10**6)} MB"


def parse_size(text: str) -> int:
    """Return the bytes in `5GB`, `500 MB`, `1GiB` or a number; ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if not found or found[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size, expected a number with a unit, such as 5GB")
    return int(Fraction(found[1]) * UNITS[found[2].upper()])
