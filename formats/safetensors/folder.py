"""A folder of safetensors, opened by its headers: which file holds which tensor, and all the rest.

The index decides which file holds a tensor. Files and copies it does not name are reported, not
used; whatever it promises and a file does not hold is refused. Nothing is ever unpickled and no
code of a checkpoint is run: side files are copied by an allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.family.recognise import recognise
from formats.json_file import read_object
from formats.links import check_leads, check_links, repository_of, snapshot_in
from formats.missing import missing
from formats.safetensors.adapters import ADAPTER_CONFIG, adapters, no_model
from formats.safetensors.beside import GGUF, PICKLES, adapter_config
from formats.safetensors.choose import choose
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.index import INDEX_NAME, WEIGHTS
from formats.safetensors.methods import block_beside, refuse_method, with_block
from formats.safetensors.nested import is_nested, names_in, nested_names
from formats.safetensors.place import Choice, Folder
from formats.safetensors.placing import is_whole, open_all, place_tensors
from formats.side_names import (
    ADDED_TOKENS,
    CONFIG,
    GENERATION,
    IMAGES,
    LEGACY_TEMPLATE,
    MERGES,
    PROCESSOR,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEOS,
    VOCAB,
)
from formats.stored import Recogniser

CONTAINER = "safetensors"
# What people read; no engine does.
DOCUMENTS = (
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "README.md",
)
SIDE_FILES = (
    *DOCUMENTS,
    ADDED_TOKENS,
    TEMPLATE,
    LEGACY_TEMPLATE,
    "config_sentence_transformers.json",
    GENERATION,
    MERGES,
    "modules.json",
    IMAGES,
    PROCESSOR,
    "sentence_bert_config.json",
    SPECIAL_TOKENS,
    TOKENIZER,
    "tokenizer.model",
    TOKENIZER_CONFIG,
    VIDEOS,
    VOCAB,
)
MAX_SIDE_BYTES = 128 << 20


class _Sides(Mapping[str, bytes]):
    """The side files of a folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        path = self._folder / name
        if not (name in SIDE_FILES or is_nested(name)) or not path.is_file():
            raise KeyError(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise FormatError(f"{name} cannot be read: {error.strerror}") from None

    def __iter__(self) -> Iterator[str]:
        there = names_in(self._folder)
        plain = [n for n in SIDE_FILES if n in there and (self._folder / n).is_file()]
        return iter((*plain, *nested_names(self._folder)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_folder(path: Path, recognisers: Sequence[Recogniser], name: str = "") -> Checkpoint:
    """Open a folder, or one .safetensors file beside its config.json.

    name  what people call the model (default: the folder's name)

    FormatError if anything about the files themselves is wrong; what is wrong with the tensors is
    in `layout.problems`.
    """
    try:
        return _open(path, recognisers, name)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None


def _open(path: Path, recognisers: Sequence[Recogniser], name: str) -> Checkpoint:
    folder, only = _locate(path)
    place = Folder(folder)
    if not (folder / CONFIG).is_file():
        _refuse_no_config(place)
    raw = read_object(folder / CONFIG)
    config = check_config(with_block(place, raw))
    sides = {*place.names.intersection(SIDE_FILES), *nested_names(folder)}
    _check_sides(folder, sorted(sides))
    choice = choose(place, only, partial(is_whole, place, config, recognisers))
    check_links(folder, {CONFIG, choice.file, *sides, *choice.names} - {only})
    files, hub = open_all(place, choice.names), repository_of(folder)
    title = name or (hub[0].rpartition("/")[2] if hub else folder.resolve().name)
    beside = block_beside(place, raw)
    headers = Headers(folder, title, config, files, choice, _Sides(folder), beside)
    return assemble(headers, recognisers)


def _refuse_no_config(place: Folder) -> NoReturn:
    """Refuse a folder without a config.json, and say what else it seems to be."""
    check_leads(place.path / CONFIG)
    if ADAPTER_CONFIG in place.names or adapters(place.names):
        raise no_model(place.label, adapter_config(place))
    below = sorted(str(path.parent) for path in place.path.glob(f"*/{CONFIG}"))
    ggufs = sorted(place.path_of(name) for name in place.names if name.endswith(GGUF))
    near = [f"give the one that is meant: {path}" for path in (*below, *ggufs)]
    if near or any(name.endswith(WEIGHTS) for name in place.names):
        fix = near[0] if near else "copy it here from the model that the weights were made from"
        raise FormatError(f"{place.label}: {CONFIG} is missing", fix=fix)
    raise FormatError(
        f"{place.label}: {CONFIG} is missing, and so are .safetensors files",
        fix="give the folder that they are in, or a .gguf file",
    )


def check_config(raw: dict[str, Any]) -> Config:
    """Return what a config.json says; refuse by name what another quantiser wrote."""
    refuse_method(raw)
    return read_config(raw)


@dataclass(frozen=True, slots=True)
class Headers:
    """What was read of a folder, here or on the hub.

    choice  which files they are, the index, and what is said of others
    beside  files that were read to fill in the config
    """

    folder: Path
    name: str
    config: Config
    files: Mapping[str, SafetensorsFile]
    choice: Choice
    sides: Mapping[str, bytes]
    beside: tuple[str, ...] = ()


def assemble(headers: Headers, recognisers: Sequence[Recogniser]) -> Checkpoint:
    """Return the checkpoint of these headers; FormatError if the index is not about the files."""
    files, choice, index = headers.files, headers.choice, headers.choice.index
    stubs = (
        f"{name}: {stub} is an empty stub; it is dropped"
        for name, file in files.items()
        for stub in file.header.stubs
    )
    where, copies = place_tensors(files, index)
    strays = (*copies, *choice.strays)
    infos = {name: files[file].infos[name] for name, file in where.items()}
    return Checkpoint(
        container=CONTAINER,
        folder=headers.folder,
        place=headers.folder,
        name=headers.name,
        config=headers.config,
        layout=recognise(infos, headers.config, recognisers),
        files=files,
        where=where,
        sides=headers.sides,
        beside=(
            *(CONFIG, *headers.beside, *sorted(headers.sides)),
            *((choice.file,) if index is not None else ()),
        ),
        notes=(*stubs, *strays, *choice.notes),
        strays=strays,
    )


def _locate(path: Path) -> tuple[Path, str | None]:
    if path.is_dir():
        return snapshot_in(path), None
    check_leads(path)
    if not path.exists():
        raise missing(path, "a folder, .safetensors or .gguf")
    if path.suffix != WEIGHTS and not INDEX_NAME.fullmatch(path.name):
        what = "is a pickle, which can run code" if path.suffix in PICKLES else ""
        near = (path.parent / CONFIG).is_file()
        raise FormatError(
            f"{path.name} {what or 'is not a folder, a .safetensors or a .gguf file'}",
            expected="a folder, a .safetensors or a .gguf file" if what else "",
            fix=f"give its folder: {path.parent}" if near else "",
        )
    return path.parent, path.name


def _check_sides(folder: Path, names: Iterable[str]) -> None:
    """Refuse a side file that is too large, before anything is read or written."""
    for name in names:
        path = folder / name
        check_leads(path)
        size = path.stat().st_size if path.is_file() else 0
        if size > MAX_SIDE_BYTES:
            raise FormatError(f"{name} has {size} bytes, expected at most {MAX_SIDE_BYTES}")
