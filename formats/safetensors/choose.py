"""Which files of a folder are the model, and what the others are.

    model.safetensors.index.json, else model.safetensors, else all files together

A folder can hold the model twice: shards and index of the base, and beside them what a trainer
saved as one file. transformers then reads the file, vLLM the index. Where only one of them is whole
that one is taken; where both are, the folder is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from formats.content import DOWNLOAD
from formats.errors import FormatError
from formats.safetensors.adapters import adapters, no_model
from formats.safetensors.beside import adapter_config, refuse_no_weights, with_others
from formats.safetensors.index import (
    INDEX,
    SINGLE,
    WEIGHTS,
    check_index,
    indexes,
    shard_sets,
    siblings,
)
from formats.safetensors.place import Choice, Place, weights_in

MODEL = "model"
CONTROL = ".aria2"  # ends the name of what aria2 keeps beside a file until it is whole
Whole = Callable[[Choice], bool]


def choose(place: Place, only: str | None, whole: Whole) -> Choice:
    """Return the files of the model.

    only   a file that was named: one of weights, or an index
    whole  whether files hold a whole model

    FormatError if there is none, if it is not all there, or if there are two.
    """
    if only is None:
        choice = _of_folder(place, whole)
    elif only.endswith(WEIGHTS):
        choice = _of_file(place, only)
    else:
        choice = _indexed(place, only)
    absent = sorted({*choice.names} - {*place.names})
    if absent:
        _refuse_absent(place, choice, absent)
    _check_finished(place, choice)
    return with_others(place, choice)


def _of_file(place: Place, only: str) -> Choice:
    """Return the set of files that a named one belongs to."""
    if adapters([only]):
        raise no_model(place.label, adapter_config(place))
    choice = next((one for one in _indexed_sets(place) if only in one.names), None)
    choice = choice or Choice(tuple(siblings(only)) or (only,))
    if len(choice.names) == 1:
        return choice
    note = f"{only} is one of the {len(choice.names)} files of the model; all are read"
    return replace(choice, notes=(note,))


def _indexed_sets(place: Place) -> Iterator[Choice]:
    """Yield the sets of files of every index that can be read."""
    for file in indexes(place.names):
        with suppress(FormatError):
            yield _indexed(place, file)


def _of_folder(place: Place, whole: Whole) -> Choice:
    if INDEX in place.names:
        several = _indexed(place, INDEX)
        rest = weights_in(place, but=several.names)
        alone = [SINGLE] if SINGLE in rest else [] if _is_there(place, several) else rest
    elif SINGLE in place.names:
        sets = (Choice(tuple(files)) for files in shard_sets(place.names))
        shards = (one for one in sets if one.names[0].startswith(MODEL) and _is_there(place, one))
        several, alone = next(shards, Choice(())), [SINGLE]
    else:
        return _without_names(place)
    return _of_two(place, Choice(tuple(alone)), several, whole)


def _of_two(place: Place, single: Choice, several: Choice, whole: Whole) -> Choice:
    """Return the one that is whole; the index's, if neither is."""
    if not single.names or not several.names:
        return single if single.names else several
    if not whole(single):
        return several if several.index is not None else single
    there = _is_there(place, several)
    if there and _are_same(place, single, several):
        return several
    if there and whole(several):
        _refuse_two(place, single, several)
    if several.index is None:
        return single
    what = "hold no complete model" if there else "are not all there"
    stale = (
        f"{several.label} is not used: its files {what}; {single.label} is complete, and is read"
    )
    return replace(single, strays=(stale,))


def _refuse_two(place: Place, single: Choice, several: Choice) -> NoReturn:
    one, other = (place.path_of(choice.source) for choice in (single, several))
    raise FormatError(
        place.label,
        f"holds the model twice: in {single.label}, which transformers reads, "
        f"and in {several.label}, which vLLM reads",
        "one of them",
        f"give the one you mean as the source: {one} or {other}",
    )


def _without_names(place: Place) -> Choice:
    """Return all files of weights together, where neither the index nor the file has its name."""
    index_names = indexes(place.names)
    if len(index_names) > 1:
        raise FormatError(
            place.label,
            f"has {len(index_names)} indexes: {', '.join(index_names)}",
            f"{INDEX}, or one of them",
            f"give the one you mean as the source: {place.path_of(index_names[0])}",
        )
    if index_names:
        return _indexed(place, index_names[0])
    names = weights_in(place)
    if not names:
        refuse_no_weights(place)
    shards = (shard for files in shard_sets(names) for shard in files)
    return Choice(tuple(sorted({*names, *shards})))


def _indexed(place: Place, file: str) -> Choice:
    index = check_index(place.read(file), file)
    return Choice(tuple(sorted(set(index.values()))), index, file)


def _is_there(place: Place, choice: Choice) -> bool:
    return {*choice.names} <= {*place.names}


def _are_same(place: Place, one: Choice, other: Choice) -> bool:
    files = ({place.identity(name) for name in choice.names} for choice in (one, other))
    return next(files) == next(files)


def _check_finished(place: Place, choice: Choice) -> None:
    """Refuse files that aria2 has given their size, but not yet their bytes."""
    for name in choice.names:
        if name + CONTROL in place.names:
            raise FormatError(
                name,
                f"has {name}{CONTROL} beside it: its download was not finished",
                "a whole file",
                f"finish it with aria2c -c, or {DOWNLOAD}",
            )


def _refuse_absent(place: Place, choice: Choice, absent: Sequence[str]) -> NoReturn:
    others = (
        f", nor do {', '.join(absent[1:4])}{' ...' if absent[4:] else ''}" if absent[1:] else ""
    )
    if choice.index is None:
        there = next(name for name in choice.names if name not in absent)
        what = f"{absent[0]}, one of {len(siblings(absent[0]))} files with {there}"
    else:
        tensor = next(name for name, file in choice.index.items() if file == absent[0])
        what = f"{choice.file}: {tensor} is in {absent[0]!r}, which"
    raise FormatError(f"{what} does not exist{others}", fix=place.again)
