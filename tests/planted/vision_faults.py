"""Faults of the vision tower: in an mmproj file, and in a folder of the hub's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from formats.gguf.header import Kv
from tests.planted.artifact import Artifact
from tests.planted.edit import read_file
from tests.planted.fault import (
    AS_IT_IS,
    BOTH,
    FORGED,
    NAMED,
    STRUCTURE,
    TENSORS,
    UNOPENED,
    Fault,
    Names,
    in_bases,
)
from tests.planted.vision_keys import ADDED, KEYS, RECAST, REQUIRED
from tests.planted.vision_tensors import (
    HEADERS,
    OF_TRAINED,
    TENSORS_OF_FILES,
    TENSORS_OF_FOLDERS,
    Entries,
)

FILE = "mmproj-model.gguf"
BESIDE = in_bases("nano-mmproj", "wide-mmproj-bf16")
HUB = in_bases("moe-fp8-block-hub")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (key, value) in KEYS.items():
        yield _fault(f"key-{name}", partial(_set, key=key, value=value), STRUCTURE)
    for name, pair in ADDED.items():
        yield _fault(f"key-added-{name}", partial(_add, pair=pair), STRUCTURE)
    for name, plant in _of_keys():
        yield _fault(f"key-{name}", plant, STRUCTURE, UNOPENED)
    yield from _of_tensors()
    yield _fault("cut", _cut, STRUCTURE, UNOPENED)
    yield _fault("of-another-model", _of_another, TENSORS, where=in_bases("wide-mmproj-bf16"))
    yield _fault("a-text-model", _text_model, STRUCTURE, UNOPENED)
    yield _fault("missing", _remove, STRUCTURE, receipts=(AS_IT_IS, FORGED))


def _of_tensors() -> Iterator[Fault]:
    for name, change in TENSORS_OF_FILES.items():
        yield _fault(f"tensor-{name}", partial(_change, change=change), TENSORS)
    for name, change in OF_TRAINED.items():
        plant = partial(_change, change=change)
        yield _fault(f"tensor-{name}", plant, TENSORS, where=in_bases("wide-mmproj-bf16"))
    for name, change in HEADERS.items():
        yield _fault(f"tensor-{name}", partial(_change, change=change), STRUCTURE, UNOPENED)
    for name, change in TENSORS_OF_FOLDERS.items():
        yield _fault(f"folder-{name}", partial(_change_folder, change=change), TENSORS, where=HUB)


def _of_keys() -> Iterator[tuple[str, Callable[[Artifact], str]]]:
    for name, (key, kind) in RECAST.items():
        yield f"kind-{name}", partial(_recast, key=key, kind=kind)
    for key in REQUIRED:
        yield f"missing-{key}", partial(_unset, key=key)


def _fault(
    name: str,
    plant: Callable[[Artifact], Names],
    level: str,
    codes: tuple[int, ...] = NAMED,
    where=BESIDE,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    return Fault("vision", name, plant, where, level, codes, receipts)


def _set(artifact: Artifact, key: str, value: Any) -> str:
    file = read_file(artifact.file(FILE))
    at = next(i for i, pair in enumerate(file.pairs) if pair.key == key)
    old = file.pairs[at]
    file.pairs[at] = replace(old, value=value(old.value) if callable(value) else value)
    assert file.pairs[at] != old, f"{key} is {value} already"
    artifact.write(FILE, file.content())
    return key


def _recast(artifact: Artifact, key: str, kind: str) -> str:
    """Give a key another kind: llama.cpp aborts over it."""
    file = read_file(artifact.file(FILE))
    value = (lambda v: [v]) if kind == "array[uint32]" else (lambda v: v)
    file.pairs = [
        replace(p, kind=kind, value=value(p.value)) if p.key == key else p for p in file.pairs
    ]
    artifact.write(FILE, file.content())
    return key


def _unset(artifact: Artifact, key: str) -> str:
    file = read_file(artifact.file(FILE))
    file.pairs = [pair for pair in file.pairs if pair.key != key]
    artifact.write(FILE, file.content())
    return key


def _add(artifact: Artifact, pair: Kv) -> str:
    file = read_file(artifact.file(FILE))
    file.pairs.append(pair)
    artifact.write(FILE, file.content())
    return pair.key


def _change(artifact: Artifact, change: Callable[[Entries], Names]) -> Names:
    file = read_file(artifact.file(FILE))
    names = change(file.entries)
    artifact.write(FILE, file.content())
    return names


def _change_folder(artifact: Artifact, change: Callable[[Entries], Names]) -> Names:
    file = read_file(artifact.tensor_files()[0])
    names = change(file.entries)
    artifact.write(file.path.name, file.content())
    return names


def _cut(artifact: Artifact) -> str:
    artifact.write(FILE, artifact.file(FILE).read_bytes()[:-500])
    return FILE


def _text_model(artifact: Artifact) -> str:
    artifact.write(FILE, artifact.file("model.gguf").read_bytes())
    return f"{FILE}|general.architecture|v.blk.0"


def _of_another(artifact: Artifact) -> str:
    other = artifact.workshop.open(artifact.base, seed=36)
    artifact.write(FILE, other.file(FILE).read_bytes())
    return "v.blk.0.attn_qkv.weight"


def _remove(artifact: Artifact) -> str:
    artifact.file(FILE).unlink()
    return FILE
