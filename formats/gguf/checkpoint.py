"""A GGUF file opened as a checkpoint: config and side files come out of its metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import read_config
from formats.family.recognise import recognise
from formats.gguf.config import config_from_metadata, places_of
from formats.gguf.dialect import GgufDialect
from formats.gguf.file import GgufFile
from formats.gguf.header import Kv
from formats.gguf.pooling import pooling_files
from formats.gguf.split import SHARD, open_files
from formats.links import check_leads
from formats.missing import missing
from formats.stored import Recogniser
from formats.tensor import TensorInfo

CONTAINER = "gguf"
SUFFIX = ".gguf"
ORIGIN = "metadata"
# First segments of names that Ollama's converter leaves in the file of the text model.
TOWERS = {"v": "a vision tower", "mm": "a vision tower", "mtp": "an MTP head"}


def open_gguf(path: Path, recognisers: Sequence[Recogniser]) -> Checkpoint:
    """Open a GGUF file, or all files of a split one from any of them.

    FormatError if the files, or what the metadata say, are not those of a Qwen3.5 text model; what
    is wrong with the tensors is in `layout.problems`.
    """
    check_leads(path)
    if not path.is_file():
        raise missing(path, "a GGUF file", elsewhere="")
    files = open_files(path)
    kv = files[0].kv
    infos, notes = _without_towers({n: i for file in files for n, i in file.infos.items()})
    try:
        config = read_config(config_from_metadata(kv, infos))
    except FormatError as error:
        raise FormatError(f"{path.name}: {str(error).removeprefix('config.json: ')}") from None
    places = places_of(kv["general.architecture"].value)
    config = replace(config, fields=places, origin=ORIGIN)
    told = [one.told({key: pair.value for key, pair in kv.items()}) for one in recognisers]
    return Checkpoint(
        container=CONTAINER,
        folder=path.parent,
        place=files[0].path,
        name=_name(kv, path),
        config=config,
        layout=recognise(infos, config, told, GgufDialect()),
        files={file.path.name: file for file in files},
        where={name: file.path.name for file in files for name in file.infos if name in infos},
        sides=_Sides(kv),
        notes=notes,
        strays=notes,
    )


def _without_towers(
    infos: Mapping[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Return the tensors of the text model, and a note on those of each tower embedded beside it.

    Nothing says whether the norms of such an MTP head hold w or 1 + w, nor a vision tower's sizes.
    """
    kept = {name: info for name, info in infos.items() if name.split(".", 1)[0] not in TOWERS}
    towers: dict[str, list[str]] = {}
    for name in infos.keys() - kept.keys():
        towers.setdefault(TOWERS[name.split(".", 1)[0]], []).append(name)
    notes = (
        f"{len(names)} tensors of {tower} that is embedded in the file are not read ({min(names)} "
        "...): for it, convert the original checkpoint"
        for tower, names in sorted(towers.items())
    )
    return kept, tuple(notes)


def first_file(checkpoint: Checkpoint) -> GgufFile:
    """Return the file whose metadata are those of the whole model."""
    file = next(iter(checkpoint.files.values()))
    assert isinstance(file, GgufFile), "a GGUF checkpoint holds GGUF files"
    return file


def whole_path(checkpoint: Checkpoint) -> Path:
    """Return where the model would be if it were not split: its file, if it is not."""
    first = next(iter(checkpoint.files))
    match = SHARD.fullmatch(first)
    return checkpoint.folder / (f"{match[1]}.gguf" if match else first)


def _name(kv: Mapping[str, Kv], path: Path) -> str:
    title = kv["general.name"].value if "general.name" in kv else None
    return title if isinstance(title, str) and title else path.stem


class _Sides(Mapping[str, bytes]):
    """Side files made from the metadata, when one is first asked for: a vocabulary is large."""

    def __init__(self, kv: Mapping[str, Kv]) -> None:
        self._kv = kv

    @cached_property
    def _files(self) -> Mapping[str, bytes]:
        from formats.gguf.tokenizer_files import tokenizer_files

        return tokenizer_files(self._kv) | pooling_files(self._kv)

    def __getitem__(self, name: str) -> bytes:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
