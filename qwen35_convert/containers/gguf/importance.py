"""The importance of every column, read from llama.cpp's imatrix file for the encoders that search.

A file has one vector for a tensor, or one for each expert of a stack, under GGUF names and in
GGUF's order of columns, which is the order in which rows are encoded. What it lacks is encoded
without, and said: llama-quantize says nothing, and MTP blocks are often lacking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.family.ops import Shape
from formats.family.roles import ROLES
from formats.gguf.file import GgufFile, Kv
from quant.errors import QuantError
from quant.importance import importances, unused
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_convert.containers.gguf.entry import Entry

SUMS, COUNTS = ".in_sum2", ".counts"
TYPE, DATASETS, CHUNKS = "general.type", "imatrix.datasets", "imatrix.chunk_count"
USED = "quantize.imatrix.file"


@dataclass(frozen=True, slots=True)
class Importance:
    """What an imatrix says of the atoms of a plan.

    weights  by atom, float32 [K]
    pairs    what the GGUF file says of it
    notes    what it lacks, and what it has too much
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    pairs: tuple[Kv, ...] = ()
    notes: tuple[str, ...] = ()


def read_importance(
    recipe: Recipe, tensors: Mapping[str, Sequence[Entry]], shapes: Mapping[str, Shape]
) -> Importance:
    """Return what the recipe's imatrix says of these tensors; nothing without one.

    RecipeError if the file cannot be read, is none, or does not fit the model.
    """
    if recipe.quantize.imatrix is None:
        return Importance()
    path = Path(recipe.quantize.imatrix)
    try:
        file = GgufFile(path)
        entries = _entries(file)
        by_tensor = importances(entries, shapes)
    except (FormatError, QuantError) as error:
        raise RecipeError(f"quantize.imatrix: {error}") from None
    weights = {
        part.atom.name: by_tensor[name][part.index or 0]
        for name in by_tensor
        for part in tensors[name]
    }
    return Importance(weights, _pairs(path, file, entries), _notes(path.name, entries, tensors))


def _entries(file: GgufFile) -> dict[str, tuple[Tensor, Tensor]]:
    """Return sums and counts by the name of the tensor. FormatError if this is no imatrix."""
    kind = file.kv[TYPE].value if TYPE in file.kv else None
    if kind != "imatrix":
        raise FormatError(f"{file.path.name}: {TYPE} is {kind!r}, expected 'imatrix'")
    names = [name.removesuffix(SUMS) for name in file.infos if name.endswith(SUMS)]
    for name in names:
        lost = next((p for p in (SUMS, COUNTS) if name + p not in file.infos), None)
        if lost:
            raise FormatError(f"{file.path.name}: {name}{lost} is missing")
    return {name: (_rows(file, name + SUMS), file.read(name + COUNTS)) for name in names}


def _rows(file: GgufFile, name: str) -> Tensor:
    """Return sums as [E, K]: a single row may be stored flat."""
    sums = file.read(name)
    return sums.reshape(-1, sums.shape[-1])


def _pairs(
    path: Path, file: GgufFile, entries: Mapping[str, tuple[Tensor, Tensor]]
) -> tuple[Kv, ...]:
    """Return what llama-quantize writes of the imatrix it used."""
    datasets = file.kv[DATASETS].value if DATASETS in file.kv else []
    chunks = file.kv[CHUNKS].value if CHUNKS in file.kv else None
    pairs = [
        Kv(USED, "string", path.name),
        Kv("quantize.imatrix.entries_count", "uint32", len(entries)),
    ]
    if datasets:
        pairs.insert(1, Kv("quantize.imatrix.dataset", "string", str(datasets[0])))
    if isinstance(chunks, int):
        pairs.append(Kv("quantize.imatrix.chunks_count", "uint32", chunks))
    return tuple(pairs)


def _notes(
    file: str, entries: Mapping[str, tuple[Tensor, Tensor]], tensors: Mapping[str, Sequence[Entry]]
) -> tuple[str, ...]:
    lacking = [
        name
        for name, parts in tensors.items()
        if name not in entries and not _unweighed(parts[0].atom.role)
    ]
    notes = []
    if lacking:
        notes.append(
            f"{file} lacks {len(lacking)} tensors, which are encoded without it: "
            f"{', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}"
        )
    extra = unused(entries, tensors)
    if extra:
        notes.append(f"{file} has {len(extra)} entries that no tensor here has: {extra[0]} ...")
    return tuple(notes)


def _unweighed(role: str) -> bool:
    """Whether a role is never encoded by importance: it stays F32, or its rows are looked up."""
    return ROLES[role].gguf_f32 or ROLES[role].gathered
