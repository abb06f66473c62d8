"""A checkpoint opened by its headers: config, layout, which file holds which tensor, side files.

Every container opens its files into one of these (`formats.safetensors.folder`,
`formats.gguf.checkpoint`); everybody above reads nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from formats.family.config import Config
from formats.family.layout import Atom, Layout
from formats.overlay import row_numbers, same_view, without_bytes
from formats.tensor import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from formats.overlay import Overlay
    from formats.remote import Index, Remote

MAX_MAPPED = 16 << 20
FOLIO = 2 << 20


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

    def raw(self, name: str) -> bytes | None:
        """Return a copy of a tensor's bytes, None if they are not on this machine."""
        ...

    def release(self) -> None:
        """Give back all pages."""
        ...


@dataclass(slots=True)
class _Pages:
    """Bytes that were read through maps since their pages were last given back."""

    touched: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its tensors, what they are, and what lies beside them.

    container  the kind of artifact it is, by name
    folder     where its files are
    place      what was opened: a folder or a file
    name       what people call the model: the folder's name, or the repository's
    where      file of each tensor
    sides      the side files that are carried along, by name
    beside     names of the files in `folder` that were read beside those of tensors
    notes      what was noticed while it was opened
    strays     those of the notes that name files and copies of tensors which are not used
    remote     what reads the bytes, if the files are not on this machine
    overlay    what changes values as they are read: an adapter that is merged
    """

    container: str
    folder: Path
    place: Path
    name: str
    config: Config
    layout: Layout
    files: Mapping[str, TensorFile]
    where: Mapping[str, str]
    sides: Mapping[str, bytes]
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    remote: Remote | None = None
    overlay: Overlay | None = None
    _pages: _Pages = field(default_factory=_Pages, repr=False, compare=False)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its stored name."""
        return self._infos

    @cached_property
    def _infos(self) -> Mapping[str, TensorInfo]:
        return {name: self.files[file].infos[name] for name, file in self.where.items()}

    def read(self, name: str) -> Tensor:
        """Return a view on a stored tensor.

        It is on the meta device if its bytes are not here yet, or are not those that it is to have.
        """
        data = self.files[self.where[name]].read(name)
        return without_bytes(data) if self._changed(name) else data

    def raw(self, name: str) -> bytes | None:
        """Return a copy of a stored tensor's bytes, None if they are not on this machine."""
        return self.files[self.where[name]].raw(name)

    def load(self, name: str, data: Tensor, index: Index) -> Tensor:
        """Return rows of `data`, cut out of the stored tensor `name`, with their bytes."""
        if self.overlay is None or not self._changed(name):
            return self._load(name, data, index)
        rows = self._load(name, data, index)
        return self.overlay.change(name, rows, row_numbers(data, index))

    def _load(self, name: str, data: Tensor, index: Index) -> Tensor:
        """Return rows as they are stored."""
        if not data.is_meta:
            return data[index]
        if self.remote is not None:
            return self.remote.load(name, data, index)
        return same_view(self.files[self.where[name]].read(name), data)[index]

    def _changed(self, name: str) -> bool:
        return self.overlay is not None and name in self.overlay.names

    def is_far(self, path: Path) -> bool:
        """Tell whether a file that a conversion reads is not on this machine."""
        return self.remote is not None and self.folder in path.parents

    def name_of(self, path: Path) -> str:
        """Return what a file that a conversion reads is called: a side file by its place."""
        below = path.relative_to(self.folder).as_posix() if self.folder in path.parents else ""
        return below if below in self.beside else path.name

    def identity(self, path: Path) -> tuple[str, int, str]:
        """Return name, size and what changes with a file: its hash on the hub, or its time here."""
        name = self.name_of(path)
        if self.remote is not None and self.is_far(path):
            return name, *self.remote.identity[name]
        status = path.stat()
        return name, status.st_size, str(status.st_mtime_ns)

    def proven(self, atoms: Iterable[Atom]) -> bool:
        """Tell whether what these atoms were made from is known to be right; here, it always is."""
        return self.remote is None or self.remote.proven(_stored_names(atoms))

    def release(self, nbytes: int) -> None:
        """Say that so many mapped bytes have been read: every 16 MB all pages are given back.

        All, because the kernel maps up to 2 MB around a page that is touched, which is what the
        smallest read counts for; not each time, because what another thread is reading has to be
        mapped again. Views stay valid.
        """
        self._pages.touched += max(nbytes, FOLIO)
        if self._pages.touched >= MAX_MAPPED:
            self._pages.touched = 0
            for file in self.files.values():
                file.release()

    @property
    def side_names(self) -> list[str]:
        """Names of the files that are carried along byte for byte, in a fixed order."""
        return sorted(self.sides)

    def side(self, name: str) -> bytes | None:
        """Return the content of a side file, None if there is none of that name."""
        return self.sides.get(name)

    def read_files(self) -> list[Path]:
        """Every file a conversion reads, in a fixed order."""
        beside = [self.folder / name for name in self.beside]
        return beside + [file.path for _, file in sorted(self.files.items())] + self.overlaid

    def files_of(self, atoms: Iterable[Atom]) -> list[Path]:
        """Return the files that hold all parts of these atoms, in a fixed order."""
        held = {self.where[name] for name in _stored_names(atoms)}
        return [self.files[file].path for file in sorted(held)] + self.overlaid

    @property
    def places(self) -> list[Path]:
        """What was opened, and the folder of what changes its values."""
        return [self.place] + ([self.overlay.folder] if self.overlay is not None else [])

    @property
    def overlaid(self) -> list[Path]:
        """The files of what changes values, in a fixed order."""
        files = self.overlay.files if self.overlay is not None else {}
        return [path for _, path in sorted(files.items())]

    def position(self, name: str) -> tuple[str, int]:
        """Return the file that holds a stored tensor and where it begins."""
        file = self.where[name]
        return file, self.files[file].ranges[name][0]


def _stored_names(atoms: Iterable[Atom]) -> set[str]:
    return {name for atom in atoms for name in atom.parts}
