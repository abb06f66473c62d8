"""The keys of one architecture in a GGUF file's metadata, each checked as it is asked for.

Source: `get_key` and `get_key_or_arr` of llama.cpp's loader. Trap: a size may be one number, or an
array with one for every block.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NoReturn

from formats.errors import FormatError
from formats.family.config_fields import MAX_LAYERS, MAX_SIZE
from formats.gguf.header import Kv


class Keys:
    """Values under the architecture's prefix, checked; every error names the key.

    blocks  `block_count`, MTP layers among them
    """

    def __init__(self, kv: Mapping[str, Kv], arch: str) -> None:
        self.kv = kv
        self.arch = arch
        self.blocks = 1
        self.blocks = self.size("block_count", most=MAX_LAYERS)

    def __contains__(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.kv

    def fail(self, key: str, reason: str) -> NoReturn:
        """Raise FormatError about a key."""
        raise FormatError(f"{self.arch}.{key} {reason}")

    def pair(self, key: str) -> Kv:
        """Return what is under a key that must be there."""
        if key not in self:
            self.fail(key, "is missing")
        return self.kv[f"{self.arch}.{key}"]

    def size(self, key: str, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a size; where each block has its own they must agree, 0 standing for none."""
        pair = self.pair(key)
        value = pair.value
        if isinstance(value, list):
            some = set(value) - {0}
            if len(value) != self.blocks or len(some) != 1:
                self.fail(
                    key, f"is {shown(value)}, expected the same size {self.blocks} times or once"
                )
            value = some.pop()
        if type(value) is not int or not least <= value <= most:
            self.fail(
                key, f"is {value!r} ({pair.kind}), expected an integer from {least} to {most}"
            )
        return value

    def real(self, key: str) -> float:
        """Return a positive number; of 32 bits, as the shortest decimal that is stored so."""
        pair = self.pair(key)
        if type(pair.value) is not float or not 0 < pair.value < 1e30:
            self.fail(key, f"is {pair.value!r} ({pair.kind}), expected a positive float")
        return _shortest(pair.value) if pair.kind == "float32" else pair.value


def _shortest(value: float) -> float:
    """Return the decimal of fewest digits that has the same 32 bits (9 always suffice)."""
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(d for d in decimals if struct.pack("<f", d) == struct.pack("<f", value))


def shown(value: object) -> str:
    """Return a value as an error shows it: the start of it, if it is long."""
    start = repr(value[:8] if isinstance(value, list) else value)[:120]
    return f"{start}... of {len(value)}" if isinstance(value, list) and len(value) > 8 else start
