r"""JSON from outside, read strictly: UTF-8, bounded size and depth, no duplicate keys, no NaN.

The number of values is bounded too. Trap: Python reads `1e400` as infinity, UTF-16 as JSON and
`\ud800` as text, which cannot be written again, without a word; all are refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

from formats.content import content_of
from formats.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON_BYTES = 64 << 20
# A value takes up to 200 bytes once it is read. The largest release (92 layers of 512 experts, each
# with 6 tensors) has 1.4 million of them in one header.
MAX_VALUES = 3_000_000
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise FormatError(f"key {twice!r} is duplicated")
    return values


def _no_constant(word: str) -> NoReturn:
    raise FormatError(f"{word} is not a JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise FormatError(f"{number} is too large for a number")
    return value


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `text`; FormatError names `where` and what is wrong."""
    value = _parse(text, where)
    if not isinstance(value, dict):
        raise FormatError(f"{where} holds {type(value).__name__}, expected an object")
    return value


def parse_list(text: bytes, where: str) -> list[Any]:
    """Return the JSON list in `text`; FormatError names `where` and what is wrong."""
    value = _parse(text, where)
    if not isinstance(value, list):
        raise FormatError(f"{where} holds {type(value).__name__}, expected a list")
    return value


def _parse(text: bytes, where: str) -> object:
    try:
        _check_count(text)
        value: object = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        _check_surrogates(text, value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        content = content_of(text)
        if content is not None:
            raise FormatError(f"{where} {content.what}", fix=content.fix) from None
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(f"{where} is not JSON: {reason}") from None
    return value


def _check_count(text: bytes) -> None:
    """Refuse what would be small in a file and large in memory."""
    commas = text.count(b",")
    if commas >= MAX_VALUES:
        raise FormatError(f"it has {commas} commas, expected less than {MAX_VALUES}")


def _check_surrogates(text: bytes, value: object) -> None:
    """Refuse half of a UTF-16 pair, which only an escape can bring in."""
    if not SURROGATE.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise FormatError(f"it holds {half}, half of a surrogate pair") from None


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise FormatError(f"{path.name} has {size} bytes, expected at most {limit}")
        text = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path.name} cannot be read: {error.strerror}") from None
    return parse_object(text, path.name)
