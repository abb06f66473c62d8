"""How the header of a GGUF file differs from the one that its recipe makes of the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.gguf.file import GgufFile
from formats.gguf.header import Kv, parse_header
from qwen35_convert.difference import ABSENT, differences, first, misplaced, near

OTHERWISE = "has a header of the same keys and tensors, but written differently or in another order"


def header_differences(path: Path, expected: bytes) -> Iterator[str]:
    """Yield how keys, values and tensors differ from those of the expected header."""
    head, file = parse_header(path.name, memoryview(expected)), GgufFile(path)
    keys = list(first(_by_key(_plain(file.kv), _plain(head.kv))))
    kinds = list(first(_by_key(_kinds(file.kv), _kinds(head.kv)))) if not keys else []
    tensors = [
        {n: [i.dtype, list(i.shape)] for n, i in infos.items()}
        for infos in (file.infos, head.infos)
    ]
    sentences = [*keys, *kinds, *(list(first(_by_key(*tensors))) or misplaced(*map(list, tensors)))]
    yield from sentences or [OTHERWISE]


def _by_key(got: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Compare values by whole keys, which hold dots of their own."""
    for key in dict.fromkeys((*expected, *got)):
        pair = got.get(key, ABSENT), expected.get(key, ABSENT)
        yield from first(differences(*pair, key, near), 3)


def _plain(kv: Mapping[str, Kv]) -> dict[str, Any]:
    return {key: kv[key].value for key in kv}


def _kinds(kv: Mapping[str, Kv]) -> dict[str, str]:
    return {key: kv[key].kind for key in kv}
