"""How the keys of a GGUF file differ from expected ones, as llama.cpp reads them.

A key that one side lacks differs unless its value does what its absence does; records do not count
(`formats.gguf.obeyed`). Trap: the kind of a value counts, llama.cpp refuses another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from formats.gguf.header import Kv
from formats.gguf.keys import shown
from formats.gguf.obeyed import (
    BY_BLOCK,
    KINDS,
    MAY_LACK,
    RECORD_KINDS,
    SAMPLING,
    is_record,
    of_arch,
)
from qwen35_convert.difference import ABSENT, differences, first, near

MOST_OF_A_KEY = 3
# The kinds of scalars that llama.cpp reads.
NATURAL = {bool: "bool", int: "uint32", float: "float32", str: "string"}


@dataclass(frozen=True, slots=True)
class Reading:
    """What is right beside the expected value, for one architecture.

    absent  values that do what the absence of a key does, by key
    others  further right values, by key
    """

    arch: str
    absent: Mapping[str, tuple[Any, ...]]
    others: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def key_differences(
    got: Mapping[str, Kv], expected: Mapping[str, Kv], reading: Reading
) -> Iterator[str]:
    """Yield a sentence for each key that says something else than it should."""
    kinds = of_arch(KINDS, reading.arch)
    settled = _settle(got, reading.arch)
    yield from _records_of_kinds(got)
    for key in dict.fromkeys((*expected, *settled)):
        if is_record(key, reading.arch) or (key not in settled and MAY_LACK.fullmatch(key)):
            continue
        pair, wanted = settled.get(key), expected.get(key)
        if not _is_right(key, pair, wanted, reading):
            yield from first(differences(_value(pair), _value(wanted), key, near), MOST_OF_A_KEY)
        elif pair is not None and not key.startswith(SAMPLING):
            yield from _of_kinds(got[key], wanted, kinds.get(key, ()))


def _records_of_kinds(got: Mapping[str, Kv]) -> Iterator[str]:
    pairs = ((got[key], kind) for key, kind in RECORD_KINDS.items() if key in got)
    yield from filter(None, (kind_problem(*pair) for pair in pairs))


def _settle(got: Mapping[str, Kv], arch: str) -> dict[str, Kv]:
    """Return the pairs, a size that every block states alike as that size."""
    settled = {key: got[key] for key in got}
    count = got.get(f"{arch}.block_count")
    for key in (key.format(arch=arch) for key in BY_BLOCK):
        sizes = _value(settled.get(key))
        if isinstance(sizes, list) and len(sizes) == _value(count) and len(set(sizes)) == 1:
            settled[key] = Kv(key, NATURAL[int], sizes[0])
    return settled


def _value(pair: Kv | None) -> Any:
    return ABSENT if pair is None else pair.value


def _is_right(key: str, pair: Kv | None, wanted: Kv | None, reading: Reading) -> bool:
    absent, others = reading.absent.get(key, ()), reading.others.get(key, ())
    right = others if wanted is None else (wanted.value, *others)
    if pair is None:
        return any(_equal(one, value) for one in absent for value in right)
    return any(_equal(pair.value, one) for one in (*right, *(absent if wanted is None else ())))


def _equal(got: Any, expected: Any) -> bool:
    """Whether two values are equal but for float32; kinds are compared elsewhere."""
    return bool(got == expected) or not any(differences(got, expected, equal=near))


def _of_kinds(pair: Kv, wanted: Kv | None, others: tuple[str, ...]) -> Iterator[str]:
    natural = NATURAL.get(type(pair.value), pair.kind)
    problem = kind_problem(pair, natural if wanted is None else wanted.kind, *others)
    if problem:
        yield problem


def kind_problem(pair: Kv, kind: str, *others: str) -> str | None:
    """Return that a pair is of another kind than it should be, or may be, if so."""
    if pair.kind in (kind, *others):
        return None
    return f"{pair.key} is {shown(pair.value)} ({pair.kind}), expected {kind}"
