"""Values of a GGUF file's pairs, each by the Python type that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from formats.errors import FormatError
from formats.gguf.header import Kv

T = TypeVar("T")


def value_of(kv: Mapping[str, Kv], key: str, kind: type[T]) -> T | None:
    """Return a value of a kind, None if the key is not there."""
    pair = kv.get(key)
    if pair is not None and type(pair.value) is not kind:
        raise FormatError(
            f"{key} is {str(pair.value)[:80]} ({pair.kind}), expected {kind.__name__}"
        )
    return None if pair is None else pair.value


def need(kv: Mapping[str, Kv], key: str, kind: type[T]) -> T:
    """Return a value of a kind that must be there."""
    value = value_of(kv, key, kind)
    if value is None:
        raise FormatError(f"{key} is missing")
    return value
