"""How two values of a JSON file, of metadata or of a text differ, field by field.

    text_config.rope_parameters.rope_theta is 10000, expected 10000000

Floats are compared as they are written: one that went through float32 is not the same.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from math import isclose
from typing import Any

MOST = 5
MAX_SHOWN = 80
ABSENT = object()


def differences(
    got: Any, expected: Any, path: str = "", equal: Callable[[Any, Any], bool] | None = None
) -> Iterator[str]:
    """Yield one sentence for each field that is not as expected; numbers of one value are equal."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*expected, *got)):
            inner = f"{path}.{key}" if path else str(key)
            yield from differences(got.get(key, ABSENT), expected.get(key, ABSENT), inner, equal)
    elif isinstance(got, list) and isinstance(expected, list):
        yield from _of_lists(got, expected, path, equal)
    elif not (equal or same)(got, expected):
        yield f"{path} is {_shown(got)}, expected {_shown(expected)}"


def same(got: Any, expected: Any) -> bool:
    """Whether two plain values are equal; a NaN equals nothing, true is not 1."""
    return isinstance(got, bool) == isinstance(expected, bool) and bool(got == expected)


def near(got: Any, expected: Any) -> bool:
    """Whether two plain values are equal but for a step of float32, in which one was computed."""
    if isinstance(got, float) and isinstance(expected, float | int):
        return isclose(got, expected, rel_tol=2.0**-23)
    return same(got, expected)


def rounded(got: Any, expected: Any) -> bool:
    """Whether two plain values are the same number in float32."""
    if isinstance(got, float) and isinstance(expected, float | int):
        return got == expected or _float32(got) == _float32(expected)
    return same(got, expected)


def _float32(x: float) -> bytes | float:
    """Return the bytes of a number rounded to float32; itself where it is too large."""
    try:
        return struct.pack("<f", x)
    except OverflowError:
        return x


def _of_lists(
    got: list[Any], expected: list[Any], path: str, equal: Callable[[Any, Any], bool] | None
) -> Iterator[str]:
    for i, pair in enumerate(zip(got, expected, strict=False)):
        yield from differences(*pair, f"{path}[{i}]", equal)
    if len(got) != len(expected):
        yield f"{path} has {len(got)} entries, expected {len(expected)}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def first(sentences: Iterator[str], most: int = MOST) -> Iterator[str]:
    """Yield the first sentences, and how many more there are."""
    listed = list(sentences)
    yield from listed[:most]
    if len(listed) > most:
        yield f"and {len(listed) - most} more differences"


def misplaced(got: Sequence[str], expected: Sequence[str]) -> Iterator[str]:
    """Yield which of the same things is the first that lies in another place."""
    for one, other in zip(got, expected, strict=False):
        if one != other:
            yield f"{one} lies where {other} is expected"
            return


def of_file(name: str, got: bytes, expected: bytes) -> Iterator[str]:
    """Yield how a file differs from what is expected of it: by fields, by lines, or by bytes."""
    if got == expected:
        return
    if name.endswith(".json"):
        try:
            fields = list(differences(json.loads(got), json.loads(expected)))
        except ValueError:
            yield "is not JSON"
            return
        yield from first(iter(fields or ["is formatted differently; its fields are equal"]))
        return
    yield _of_texts(got, expected)


def _of_texts(got: bytes, expected: bytes) -> str:
    lines, wanted = got.splitlines(), expected.splitlines()
    for i, (line, want) in enumerate(zip(lines, wanted, strict=False), 1):
        if line != want:
            return f"line {i} is {_text(line)}, expected {_text(want)}"
    return (
        f"has {len(lines)} lines and {len(got)} bytes, expected {len(wanted)} and {len(expected)}"
    )


def _text(line: bytes) -> str:
    return _shown(line.decode("utf-8", "replace"))
