"""Faults of models in several files: parts of another conversion, missing, in the wrong order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tests.planted.artifact import Artifact, Base
from tests.planted.edit import editing, read_file
from tests.planted.fault import (
    BOTH,
    FORGED,
    NAMED,
    STRUCTURE,
    UNOPENED,
    Fault,
    Names,
    in_bases,
)

SPLIT, SHARDED = in_bases("wide-split"), in_bases("wide-sharded")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for where in (SPLIT, SHARDED):
        for index in (1, 2, 3):
            plant = partial(_from_another, index=index)
            yield Fault("parts", f"of-another-model-{index}", plant, where)
            yield _fault(f"missing-{index}", partial(_remove, index=index), where, UNOPENED)
            yield _fault(f"cut-{index}", partial(_cut, index=index), where, UNOPENED)
        yield _fault("exchanged", _exchange, where, UNOPENED)
        yield _fault("a-tensor-in-two", _copy_tensor, where, UNOPENED)
        yield _fault("empty", partial(_empty, index=1), where, UNOPENED)
        yield Fault("parts", "a-tensor-moved", _move_tensor, where, STRUCTURE, receipts=(FORGED,))
    for key in ("split.no", "split.count", "split.tensors.count"):
        yield _fault(f"{key}-wrong", partial(_renumber, key=key), SPLIT, UNOPENED)
        yield _fault(f"{key}-missing", partial(_unnumber, key=key), SPLIT, UNOPENED)
    yield _fault("first-missing", partial(_remove, index=0), SHARDED, UNOPENED)


def _fault(
    name: str,
    plant: Callable[[Artifact], Names],
    where: Callable[[Base], bool],
    codes: tuple[int, ...] = NAMED,
) -> Fault:
    return Fault("parts", name, plant, where, STRUCTURE, codes, BOTH)


def _from_another(artifact: Artifact, index: int) -> Names:
    """Take one part from the conversion of a model of the same shapes."""
    name = artifact.tensor_files()[index].name
    ours = read_file(artifact.file(name)).entries
    other = artifact.workshop.open(artifact.base, seed=36)
    artifact.write(name, other.file(name).read_bytes())
    changed = read_file(artifact.file(name)).entries
    differing = [n for n in ours if ours[n].data.tobytes() != changed[n].data.tobytes()]
    return tuple(n for n in differing if n.endswith(".weight"))


def _remove(artifact: Artifact, index: int) -> str:
    path = artifact.tensor_files()[index]
    path.unlink()
    return path.name


def _cut(artifact: Artifact, index: int) -> str:
    path = artifact.tensor_files()[index]
    artifact.write(path.name, path.read_bytes()[:-1000])
    return path.name


def _empty(artifact: Artifact, index: int) -> str:
    path = artifact.tensor_files()[index]
    artifact.write(path.name, b"")
    return path.name


def _exchange(artifact: Artifact) -> str:
    """Let two parts have each other's names."""
    one, two = artifact.tensor_files()[1:3]
    first, second = one.read_bytes(), two.read_bytes()
    artifact.write(one.name, second)
    artifact.write(two.name, first)
    return f"{one.name}|{two.name}"


def _copy_tensor(artifact: Artifact) -> str:
    """Let a tensor stand in two files, with two values."""
    files = [read_file(path) for path in artifact.tensor_files()]
    name = next(n for n in files[1].entries if n.endswith(".weight"))
    copied = files[1].entries[name].renamed(name)
    copied.data[:] = 0
    files[2].entries = files[2].entries | {name: copied}
    artifact.write(files[2].path.name, files[2].content())
    return f"{name}|split.tensors.count"


def _move_tensor(artifact: Artifact) -> str:
    """Let a tensor stand in the file before: as right, but not what we write."""
    with editing(artifact) as tensors:
        name = next(n for n in tensors.files[1].entries if n.endswith("norm.weight"))
        moved = tensors.files[1].entries.pop(name)
        tensors.files[0].entries[name] = moved
    return f"{name}|{tensors.files[0].path.name}"


def _renumber(artifact: Artifact, key: str) -> str:
    path = artifact.tensor_files()[1]
    file = read_file(path)
    file.pairs = [
        replace(pair, value=pair.value + 1) if pair.key == key else pair for pair in file.pairs
    ]
    artifact.write(path.name, file.content())
    return key


def _unnumber(artifact: Artifact, key: str) -> str:
    path = artifact.tensor_files()[1]
    file = read_file(path)
    file.pairs = [pair for pair in file.pairs if pair.key != key]
    artifact.write(path.name, file.content())
    return key
