"""Files of a model, opened together: which file holds which tensor, and whether all are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from formats.errors import FormatError
from formats.family.config import Config
from formats.family.names import PARTS
from formats.family.recognise import recognise
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.index import INDEX
from formats.safetensors.place import Choice, Place
from formats.stored import MAX_NAMED, Recogniser


def open_all(place: Place, names: Iterable[str]) -> dict[str, SafetensorsFile]:
    """Open files of weights. FormatError is about the first that is none, and counts the others."""
    files: dict[str, SafetensorsFile] = {}
    faults: dict[str, FormatError] = {}
    for name in names:
        try:
            files[name] = place.open(name)
        except FormatError as error:
            faults[name] = error
    if faults:
        (_, first), *others = faults.items()
        names = ", ".join(name for name, _ in others[:MAX_NAMED])
        rest = " ..." if others[MAX_NAMED:] else ""
        more = f"\n  and   {len(others)} more: {names}{rest}" if others else ""
        raise FormatError(f"{first.without_fix()}{more}", fix=first.fix)
    return files


def is_whole(
    place: Place, config: Config, recognisers: Sequence[Recogniser], choice: Choice
) -> bool:
    """Tell whether these files hold a whole model; vision and MTP may be lost."""
    try:
        files = open_all(place, choice.names)
        where, _ = place_tensors(files, choice.index)
    except FormatError:
        return False
    infos = {name: files[file].infos[name] for name, file in where.items()}
    return not recognise(infos, config, recognisers).problems_without(PARTS.values())


def place_tensors(
    files: Mapping[str, SafetensorsFile], index: Mapping[str, str] | None
) -> tuple[dict[str, str], list[str]]:
    """Return tensor -> file, and notes on copies that are not used."""
    if index is None:
        return _place_without_index(files), []
    for name, file in index.items():
        if name not in files[file].header.infos and name not in files[file].header.stubs:
            raise FormatError(
                f"{INDEX}: {name} is not in {file}",
                fix="remove the index, if the files beside it are the model: it is of another",
            )
    where = {name: file for name, file in index.items() if name not in files[file].header.stubs}
    return where, list(_unused(files, index))


def _place_without_index(files: Mapping[str, SafetensorsFile]) -> dict[str, str]:
    where: dict[str, str] = {}
    for file, opened in files.items():
        for name in opened.header.infos:
            if name in where:
                raise FormatError(
                    f"{name} is in {where[name]} and in {file}, and no index decides",
                    fix=f"give the one you mean as the source, such as {where[name]}, "
                    f"or restore {INDEX}",
                )
            where[name] = file
    return where


def _unused(files: Mapping[str, SafetensorsFile], index: Mapping[str, str]) -> Iterator[str]:
    for file, opened in files.items():
        for name in opened.header.infos:
            if name not in index:
                yield f"{file}: {name} is not in the index; it is not used"
            elif index[name] != file:
                yield f"{file}: {name} is superseded by the copy in {index[name]}"
