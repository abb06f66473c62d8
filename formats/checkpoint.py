"""A checkpoint folder, opened by its headers: which file holds which tensor, and all the rest.

The index decides which file holds a tensor. Files and copies it does not name are reported, not
used; whatever it promises and a file does not hold is refused. Nothing is ever unpickled and no
code of a checkpoint is run: side files are copied by an allow-list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.family.layout import BLOCK, Atom, Layout, recognise
from formats.json_file import read_object
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.names import FROM_ORIGINAL, KNOWN_METHODS
from formats.tensor import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from formats.remote import Index, Remote

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "README.md", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json",
    "vocab.json",
)  # fmt: skip
MAX_MAPPED = 16 << 20
FOLIO = 2 << 20
MAX_NAME = 255
MAX_SIDE_BYTES = 128 << 20
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorFile(Protocol):
    """An open file of tensors: safetensors or GGUF."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What it holds."""
        ...

    @property
    def ranges(self) -> Mapping[str, tuple[int, int]]:
        """First byte of each tensor in the file, and the one after its last."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a view on a tensor."""
        ...

    def release(self) -> None:
        """Give back all pages."""
        ...


@dataclass
class Checkpoint:
    """An opened checkpoint: a `Source` with its config, side files and what was noticed.

    sides  side files that are not files: what a GGUF's metadata hold; None: they are in `folder`
    gguf   the tensors come from GGUF files
    name   what people call the model: the folder's name, or the repository's
    remote what reads the bytes, if the files are not on this machine
    strays those of the notes that name files and copies of tensors which are not used
    """

    folder: Path
    config: Config
    files: Mapping[str, TensorFile]
    where: dict[str, str]
    indexed: bool = False
    notes: list[str] = field(default_factory=list)
    sides: Mapping[str, bytes] | None = None
    gguf: bool = False
    name: str = ""
    remote: Remote | None = None
    strays: list[str] = field(default_factory=list)
    _touched: int = field(default=0, init=False, repr=False)

    def add_strays(self, strays: list[str]) -> None:
        """Note what is there and not used."""
        self.strays += strays
        self.notes += strays

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its stored name."""
        return self._infos

    @cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:
        return {name: self.files[file].infos[name] for name, file in self.where.items()}

    def read(self, name: str) -> Tensor:
        """Return a view on a stored tensor; on the meta device if its bytes are not here yet."""
        return self.files[self.where[name]].read(name)

    def load(self, name: str, data: Tensor, index: Index) -> Tensor:
        """Return rows of `data`, cut out of the stored tensor `name`, with their bytes."""
        if self.remote is None or not data.is_meta:
            return data[index]
        return self.remote.load(name, data, index)

    def is_far(self, path: Path) -> bool:
        """Tell whether a file that a conversion reads is not on this machine."""
        return self.remote is not None and path.parent == self.folder

    def identity(self, path: Path) -> tuple[str, int, str]:
        """Return name, size and what changes with a file: its hash on the hub, or its time here."""
        if self.remote is not None and self.is_far(path):
            return path.name, *self.remote.identity[path.name]
        status = path.stat()
        return path.name, status.st_size, str(status.st_mtime_ns)

    def proven(self, atoms: Iterable[Atom]) -> bool:
        """Tell whether what these atoms were made from is known to be right; here, it always is."""
        return self.remote is None or self.remote.proven(_stored_names(atoms))

    def release(self, nbytes: int) -> None:
        """Say that so many mapped bytes have been read: every 16 MB all pages are given back.

        All, because the kernel maps up to 2 MB around a page that is touched, which is what the
        smallest read counts for; not each time, because what another thread is reading has to be
        mapped again. Views stay valid.
        """
        self._touched += max(nbytes, FOLIO)
        if self._touched >= MAX_MAPPED:
            self._touched = 0
            for file in self.files.values():
                file.release()

    @cached_property
    def layout(self) -> Layout:
        """Return what the tensors say this checkpoint is."""
        return recognise(self.infos(), self.config, gguf=self.gguf)

    @property
    def side_names(self) -> list[str]:
        """Names of the files that are carried along byte for byte, in a fixed order."""
        if self.sides is not None:
            return sorted(self.sides)
        return [name for name in sorted(SIDE_FILES) if (self.folder / name).is_file()]

    def side(self, name: str) -> bytes | None:
        """Return the content of a side file, None if there is none of that name."""
        if self.sides is not None:
            return self.sides.get(name)
        path = self.folder / name
        if name not in SIDE_FILES or not path.is_file():
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise FormatError(f"{name} cannot be read: {error.strerror}") from None

    def read_files(self) -> list[Path]:
        """Every file a conversion reads, in a fixed order."""
        files = [file.path for _, file in sorted(self.files.items())]
        if self.gguf:
            return files
        listed = [self.folder / name for name in ("config.json", *self.side_names)]
        return listed + ([self.folder / INDEX] if self.indexed else []) + files

    def files_of(self, atoms: Iterable[Atom]) -> list[Path]:
        """Return the files that hold these atoms and their scales, in a fixed order."""
        held = {self.where[name] for name in _stored_names(atoms)}
        return [self.files[file].path for file in sorted(held)]

    def position(self, name: str) -> tuple[str, int]:
        """Return the file that holds a stored tensor and where it begins."""
        file = self.where[name]
        return file, self.files[file].ranges[name][0]


def _stored_names(atoms: Iterable[Atom]) -> set[str]:
    return {name for atom in atoms for name in (atom.stored, atom.scale) if name}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder, one .safetensors file beside its config.json, or a GGUF file.

    FormatError if anything about the files themselves is wrong; what is wrong with the tensors is
    in `layout.problems`.
    """
    try:
        return _open(path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None


def _open(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        from formats.gguf.checkpoint import open_gguf

        return open_gguf(path)
    folder, only = _locate(path)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise FormatError(f"{folder}: config.json is missing")
    config = check_config(read_object(config_path))
    names, index = _choose_files(folder, only)
    _check_sides(folder)
    _check_links(folder, {"config.json", INDEX, *SIDE_FILES, *names} - {only})
    files = {name: SafetensorsFile(folder / name) for name in names}
    opened = assemble(folder, config, files, index)
    strays = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in files)
    why = "is not in the index; it is not used" if index else "is not used"
    opened.add_strays([f"{name} {why}" for name in strays])
    opened.name = folder.resolve().name
    return opened


def check_config(raw: dict[str, Any]) -> Config:
    """Return what a config.json says; refuse by name what another quantiser wrote."""
    _refuse_method(raw)
    return read_config(raw)


def assemble(
    folder: Path, config: Config, files: Mapping[str, SafetensorsFile], index: dict[str, str] | None
) -> Checkpoint:
    """Return the checkpoint of these opened files; FormatError if the index is not about them."""
    notes = [
        f"{name}: {stub} is an empty stub; it is dropped"
        for name, file in files.items()
        for stub in file.header.stubs
    ]
    where, strays = _place(files, index)
    opened = Checkpoint(folder, config, files, where, index is not None, notes)
    opened.add_strays(strays)
    return opened


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
    files: Mapping[str, SafetensorsFile], index: dict[str, str] | None
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


def _unused(files: Mapping[str, SafetensorsFile], index: dict[str, str]) -> Iterator[str]:
    for file, opened in files.items():
        for name in opened.header.infos:
            if name not in index:
                yield f"{file}: {name} is not in the index; it is not used"
            elif index[name] != file:
                yield f"{file}: {name} is superseded by the copy in {index[name]}"
