"""What stands behind a checkpoint whose bytes are elsewhere: its `read` gives shapes without bytes.

The tensors are on torch's meta device until rows of them are loaded; so whatever forgets to load
fails loudly, it cannot compute with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import EllipsisType

    from torch import Tensor

    Index = slice | EllipsisType | Tensor


class Remote(Protocol):
    """Who brings the bytes, and proves that they are those of the source."""

    @property
    def identity(self) -> Mapping[str, tuple[int, str]]:
        """Size and hash of every file of the source by its name."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds at most."""
        ...

    def load(self, name: str, data: Tensor, index: Index) -> Tensor:
        """Return rows of `data`, a view on a stored tensor, with their bytes."""
        ...

    def begin(self) -> None:
        """Hash what is read from now on."""
        ...

    def finish(self) -> None:
        """Hash the rest of every file that was read; refuse one that is wrong."""
        ...

    def proven(self, names: Iterable[str]) -> bool:
        """Tell whether the files of these tensors have been hashed whole."""
        ...

    def interrupt(self) -> object:
        """Stop waiting for a busy server."""
        ...

    def describe(self, names: Iterable[str], read: Iterable[Path]) -> dict[str, dict[str, Any]]:
        """Return size and SHA-256 of each file; None for one that rows were not made from."""
        ...
