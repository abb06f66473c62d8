"""The importance of every column, read from llama.cpp's imatrix file for the encoders that search.

A file has one vector for a tensor, or one for each expert of a stack, under GGUF names and in
GGUF's order of columns, which is the order in which rows are encoded. What it lacks, and what it
knows nothing of, is encoded without, and said: llama-quantize says nothing and stores zeros, and
MTP blocks are often lacking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.family.ops import Shape
from formats.family.roles import ROLES
from formats.gguf.header import Kv
from formats.gguf.imatrix import ImatrixFile, read_imatrix
from quant.errors import QuantError
from quant.ggml.kinds import POOR_UNWEIGHTED
from quant.ggml_types import METHOD
from quant.importance import FLOOR, Columns, importances, unused
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from qwen35_convert.containers.gguf.entry import Entry

USED = "quantize.imatrix.file"
MAX_NAMED = 8
MADE = "make one of this model, `qwen35 imatrix SOURCE --text FILE -o imatrix.gguf`"
FIX = f"{MADE}, or leave quantize.imatrix out"

Tensors = Mapping[str, "Sequence[Entry]"]


@dataclass(frozen=True, slots=True)
class Importance:
    """What an imatrix says of the atoms of a plan.

    weights  by atom, float32 [K]
    known    tensors that it has an entry of
    pairs    what the GGUF file says of it
    notes    what it lacks, what it knows nothing of, and what it has too much
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    known: Collection[str] = ()
    pairs: tuple[Kv, ...] = ()
    notes: tuple[str, ...] = ()


def read_importance(recipe: Recipe, tensors: Tensors, shapes: Mapping[str, Shape]) -> Importance:
    """Return what the recipe's imatrix says of these tensors; nothing without one.

    FormatError if the file cannot be read, is none, or does not fit the model.
    """
    if recipe.quantize.imatrix is None:
        return Importance()
    path = Path(recipe.quantize.imatrix)
    try:
        file = read_imatrix(path)
        columns = importances(file.entries, shapes)
        _check_model(file, tensors)
    except (FormatError, QuantError) as error:
        named = error.subject.startswith((path.name, str(path)))
        subject = error.subject if named else f"{path.name}: {error.subject}"
        subject = f"quantize.imatrix: {subject}"
        raise FormatError(subject, error.got, error.expected, error.fix or FIX) from None
    weights = {
        part.atom.name: known.values[part.index or 0]
        for name, known in columns.items()
        for part in tensors[name]
        if (part.index or 0) not in known.blank
    }
    notes = (f"{path.name}: {note}" for note in _notes(file, tensors, columns))
    return Importance(weights, columns.keys(), _pairs(path, file), tuple(notes))


def check_needed(
    recipe: Recipe, known: Collection[str], tensors: Tensors, types: Mapping[str, str]
) -> None:
    """Refuse types that are poor without an importance for tensors of which none is known.

    As llama-quantize does; the embedding and the head may have any type there too. RecipeError.
    """
    poor = [
        name
        for name, parts in tensors.items()
        if types[name] in POOR_UNWEIGHTED
        and name not in known
        and not ROLES[parts[0].atom.role].vocabulary
    ]
    if not poor:
        return
    kinds = " ".join(sorted({types[name].lower() for name in poor}))
    if recipe.quantize.imatrix is None:
        subject, got = "quantize.imatrix", f"is not given, and {len(poor)} tensors get {kinds}"
    else:
        subject = f"quantize.imatrix: {Path(recipe.quantize.imatrix).name}"
        got = f"knows nothing of {len(poor)} tensors that get {kinds}: {_listed(poor)}"
    expected = "an importance matrix, without which two and three bits lose much of a model"
    raise RecipeError(subject, got, expected, f"{MADE}, or give them other types by rules")


def _check_model(file: ImatrixFile, tensors: Tensors) -> None:
    """Refuse a file that knows no tensor of this model. FormatError."""
    weighed = [name for name, parts in tensors.items() if not _unweighed(parts[0].atom.role)]
    if weighed and file.entries.keys().isdisjoint(tensors):
        got = f"has entries for {min(file.entries)} ... and for no tensor of this model"
        raise FormatError("it", got, f"{weighed[0]} ...")


def _pairs(path: Path, file: ImatrixFile) -> tuple[Kv, ...]:
    """Return what llama-quantize writes of the imatrix it used."""
    pairs = [Kv(USED, "string", path.name)]
    if file.datasets:
        pairs.append(Kv("quantize.imatrix.dataset", "string", file.datasets[0]))
    pairs.append(Kv("quantize.imatrix.entries_count", "uint32", len(file.entries)))
    if file.chunks is not None:
        pairs.append(Kv("quantize.imatrix.chunks_count", "uint32", file.chunks))
    return tuple(pairs)


def calibration_pairs(recipe: Recipe) -> tuple[Kv, ...]:
    """Return what the file says of the text that its codes follow from; nothing without one."""
    chosen_by = recipe.quantize.chosen_by
    if chosen_by is None:
        return ()
    text = chosen_by.text if chosen_by.file is None else Path(chosen_by.file).name
    return (
        Kv(METHOD, "string", recipe.quantize.method),
        Kv("quantize.calibrate.text", "string", text),
        Kv("quantize.calibrate.tokens", "uint32", chosen_by.tokens),
    )


def _notes(file: ImatrixFile, tensors: Tensors, columns: Mapping[str, Columns]) -> Iterator[str]:
    lacking = [
        name
        for name, parts in tensors.items()
        if name not in file.entries and not _unweighed(parts[0].atom.role)
    ]
    if lacking:
        yield f"it lacks {len(lacking)} tensors, which are encoded without it: {_listed(lacking)}"
    extra = unused(file.entries, tensors)
    if extra:
        yield f"it has {len(extra)} entries that no tensor here has: {_listed(extra)}"
    uncounted = _units(tensors, {name: known.uncounted for name, known in columns.items()})
    if uncounted:
        yield (
            f"no token reached {len(uncounted)} experts or tensors, whose columns weigh alike: "
            f"{_listed(uncounted)}"
        )
    blank = _units(tensors, {name: known.blank for name, known in columns.items()})
    if blank:
        yield (
            f"all sums of {len(blank)} experts or tensors are 0, "
            f"which are encoded without it: {_listed(blank)}"
        )
    floored = {name: known.floored for name, known in columns.items() if known.floored}
    if floored:
        yield (
            f"{sum(floored.values())} columns of {len(floored)} tensors have sums of 0 and weigh "
            f"1/{1 / FLOOR:.0f} of the mean of the others: {_listed(list(floored))}"
        )


def _units(tensors: Tensors, rows: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the experts of these rows, each once, and the names of tensors that are no stacks."""
    units = (
        name if part.index is None else part.atom.name.rpartition(".")[0]
        for name, chosen in rows.items()
        for part in tensors[name]
        if (part.index or 0) in chosen
    )
    return list(dict.fromkeys(units))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (" ..." if len(names) > MAX_NAMED else "")


def _unweighed(role: str) -> bool:
    """Whether a role is never encoded by importance: it stays F32, or its rows are looked up."""
    return ROLES[role].gguf_f32 or ROLES[role].gathered
