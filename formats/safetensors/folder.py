"""A folder of safetensors, opened by its headers: which file holds which tensor, and all the rest.

The index decides which file holds a tensor. Files and copies it does not name are reported, not
used; whatever it promises and a file does not hold is refused. Nothing is ever unpickled and no
code of a checkpoint is run: side files are copied by an allow-list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.family.layout import recognise
from formats.family.names import FROM_ORIGINAL, KNOWN_METHODS
from formats.json_file import read_object
from formats.safetensors.file import SafetensorsFile
from formats.stored import Recogniser

CONTAINER = "safetensors"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
MAX_SIDE_BYTES = 128 << 20
MAX_NAME = 255
BLOCK = 128
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Sides(Mapping[str, bytes]):
    """The side files of a folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        path = self._folder / name
        if name not in SIDE_FILES or not path.is_file():
            raise KeyError(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise FormatError(f"{name} cannot be read: {error.strerror}") from None

    def __iter__(self) -> Iterator[str]:
        return (name for name in SIDE_FILES if (self._folder / name).is_file())

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
    if not (folder / CONFIG).is_file():
        raise FormatError(f"{folder}: {CONFIG} is missing")
    config = check_config(read_object(folder / CONFIG))
    names, index = _choose_files(folder, only)
    _check_sides(folder)
    _check_links(folder, {CONFIG, INDEX, *SIDE_FILES, *names} - {only})
    files = {name: SafetensorsFile(folder / name) for name in names}
    unused = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in files)
    why = "is not in the index; it is not used" if index else "is not used"
    strays = tuple(f"{stray} {why}" for stray in unused)
    title = name or folder.resolve().name
    return assemble(
        Headers(folder, title, config, files, index, _Sides(folder), strays), recognisers
    )


def check_config(raw: dict[str, Any]) -> Config:
    """Return what a config.json says; refuse by name what another quantiser wrote."""
    _refuse_method(raw)
    return read_config(raw)


@dataclass(frozen=True, slots=True)
class Headers:
    """What was read of a folder, here or on the hub.

    index   tensor -> file, if there is an index
    strays  what lies beside the files and is not used, said in notes
    """

    folder: Path
    name: str
    config: Config
    files: Mapping[str, SafetensorsFile]
    index: Mapping[str, str] | None
    sides: Mapping[str, bytes]
    strays: tuple[str, ...] = ()


def assemble(headers: Headers, recognisers: Sequence[Recogniser]) -> Checkpoint:
    """Return the checkpoint of these headers; FormatError if the index is not about the files."""
    files, index = headers.files, headers.index
    stubs = (
        f"{name}: {stub} is an empty stub; it is dropped"
        for name, file in files.items()
        for stub in file.header.stubs
    )
    where, copies = _place(files, index)
    strays = (*copies, *headers.strays)
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
        beside=(CONFIG, *sorted(headers.sides), *((INDEX,) if index is not None else ())),
        notes=(*stubs, *strays),
        strays=strays,
    )


def _locate(path: Path) -> tuple[Path, str | None]:
    if path.is_dir():
        return path, None
    if not path.exists():
        raise FormatError(f"{path} does not exist, expected a folder, .safetensors or .gguf")
    if path.suffix != ".safetensors":
        raise FormatError(f"{path.name} is not a folder, a .safetensors or a .gguf file")
    return path.parent, path.name


def _check_sides(folder: Path) -> None:
    """Refuse a side file that is no text, before anything is read or written."""
    for name in SIDE_FILES:
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size > MAX_SIDE_BYTES:
            raise FormatError(f"{name} has {size} bytes, expected at most {MAX_SIDE_BYTES}")


def _check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse links out of the folder: what they show would be read here and published elsewhere.

    The hub's cache is made of links to its blobs.
    """
    for name in sorted(names):
        path = folder / name
        if not path.is_symlink() or not path.is_file():
            continue
        real, home = path.resolve(), folder.resolve()
        if home not in real.parents and not _is_blob(real, home):
            raise FormatError(
                f"{name} is a link to {real}, expected a file of {folder}\n"
                "  fix   copy the file here, or name the folder that it is in"
            )


def _is_blob(real: Path, home: Path) -> bool:
    """Whether this is a file of a hub cache: of any, or of the one that `home` is a snapshot of."""
    if real.parent.name != "blobs":
        return False
    repo = real.parents[1]
    return repo.name.startswith("models--") or repo / "snapshots" in home.parents


def _refuse_method(raw: dict[str, Any]) -> None:
    """Refuse by name what another quantiser wrote, from the config alone."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        block = part.get("quantization_config") or part.get("quantization") or {}
        if not isinstance(block, dict):
            raise FormatError("config.json: quantization_config is not an object")
        unnamed = "mlx" if "group_size" in block else "an unnamed method"
        method = block.get("quant_method", unnamed)
        if block and method not in KNOWN_METHODS:
            raise FormatError(
                f"config.json: the checkpoint is quantised by {method}, "
                "expected BF16, F16, F32 or FP8 weights\n"
                f"  fix   {FROM_ORIGINAL}"
            )
        size = block.get("weight_block_size")
        if size not in (None, [BLOCK, BLOCK]):
            raise FormatError(
                f"config.json: weight_block_size is {size}, expected [{BLOCK}, {BLOCK}]\n"
                f"  fix   {FROM_ORIGINAL}"
            )


def _choose_files(folder: Path, only: str | None) -> tuple[list[str], dict[str, str] | None]:
    if only is not None:
        return [only], None
    if (folder / INDEX).is_file():
        index = check_index(read_object(folder / INDEX), lambda name: (folder / name).is_file())
        return sorted(set(index.values())), index
    if (folder / SINGLE).is_file():
        return [SINGLE], None
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if not found:
        _refuse_no_weights(folder)
    return found, None


def _refuse_no_weights(folder: Path) -> NoReturn:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise FormatError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when it is read; "
            "expected .safetensors\n"
            "  fix   save the model again with safe_serialization"
        )
    raise FormatError(f"{folder}: there is no .safetensors file")


def check_index(raw: dict[str, Any], exists: Callable[[str], bool]) -> dict[str, str]:
    """Return tensor -> file as an index says; FormatError for a name that is no file's here."""
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{INDEX}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not name.isprintable():
            raise FormatError(f"{INDEX}: {name!r} is no name of a tensor")
        plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not plain or len(file) > MAX_NAME or not file.endswith(".safetensors"):
            raise FormatError(
                f"{INDEX}: {name} is in {file!r:.120}, expected a .safetensors file of this folder"
            )
        if not exists(file):
            raise FormatError(f"{INDEX}: {name} is in {file!r}, which does not exist")
    return weight_map


def _place(
    files: Mapping[str, SafetensorsFile], index: Mapping[str, str] | None
) -> tuple[dict[str, str], list[str]]:
    """Return tensor -> file, and notes on copies that are not used."""
    if index is None:
        return _place_without_index(files), []
    for name, file in index.items():
        if name not in files[file].header.infos and name not in files[file].header.stubs:
            raise FormatError(f"{INDEX}: {name} is not in {file}")
    where = {name: file for name, file in index.items() if name not in files[file].header.stubs}
    return where, list(_unused(files, index))


def _place_without_index(files: Mapping[str, SafetensorsFile]) -> dict[str, str]:
    where: dict[str, str] = {}
    for file, opened in files.items():
        for name in opened.header.infos:
            if name in where:
                raise FormatError(
                    f"{name} is in {where[name]} and in {file}, and no index decides\n"
                    "  fix   remove one file, or restore model.safetensors.index.json"
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
