"""Where files of a model are, here or on the hub, and which of them it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from formats.content import DOWNLOAD
from formats.errors import FormatError
from formats.json_file import read_object
from formats.links import check_leads, repository_of
from formats.safetensors.adapters import adapters
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.index import INDEX, WEIGHTS


class Place(Protocol):
    """Where files are: a folder here, or a repository on the hub."""

    @property
    def label(self) -> str:
        """What messages call it, and commands take."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Every file that is there."""
        ...

    def path_of(self, name: str) -> str:
        """Return what to type for one of the files."""
        ...

    @property
    def again(self) -> str:
        """Return how files that are missing are fetched."""
        ...

    def identity(self, name: str) -> object:
        """Return what two names have in common that are of the same bytes."""
        ...

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file."""
        ...

    def open(self, name: str) -> SafetensorsFile:
        """Return a file of weights, its header read. FormatError if it is none."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Files that are, or may be, the model.

    index   tensor -> file, if an index says so
    file    the index's name
    strays  what is said of files of weights that are not read
    notes   what else is said
    """

    names: tuple[str, ...]
    index: Mapping[str, str] | None = None
    file: str = INDEX
    strays: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What messages call it."""
        if self.index is None:
            return self.names[0]
        return f"{self.names[0]}{' ...' if self.names[1:] else ''} ({self.file})"

    @property
    def source(self) -> str:
        """Return the file by which it is named on a command line."""
        return self.names[0] if self.index is None else self.file


class Folder:
    """A folder on this machine, as a place; a file is opened once."""

    def __init__(self, path: Path) -> None:
        self.path, self.label = path, str(path)
        self.names = frozenset(entry.name for entry in path.iterdir())
        self._files: dict[str, SafetensorsFile] = {}

    def path_of(self, name: str) -> str:
        """Return its path."""
        return str(self.path / name)

    @property
    def again(self) -> str:
        """Return the command for a snapshot of the hub's cache, else plain words."""
        hub = repository_of(self.path)
        return f"hf download {hub[0]} --revision {hub[1]}" if hub else f"{DOWNLOAD}, all files"

    def identity(self, name: str) -> object:
        """Return which file it is, through links."""
        path = self.path / name
        return (path.stat().st_dev, path.stat().st_ino) if path.exists() else name

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file."""
        path = self.path / name
        check_leads(path)
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise FormatError(f"{name} cannot be read: it is not a file")
        return read_object(path)

    def open(self, name: str) -> SafetensorsFile:
        """Return a file of weights, its header read."""
        if name not in self._files:
            check_leads(self.path / name)
            self._files[name] = SafetensorsFile(self.path / name)
        return self._files[name]


def weights_in(place: Place, but: Collection[str] = ()) -> list[str]:
    """Return the files of weights that are no adapter's."""
    files = {name for name in place.names if name.endswith(WEIGHTS)}
    return sorted(files - {*adapters(files)} - {*but})
