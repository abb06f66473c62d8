"""One atom in its GGUF tensor."""

from __future__ import annotations

from dataclasses import dataclass

from formats.family.layout import Atom
from formats.family.ops import Op, Shape, shape_after


@dataclass(frozen=True, slots=True)
class Entry:
    """One atom in its GGUF tensor: what is done to it, which entry of a stack it is."""

    atom: Atom
    name: str
    index: int | None
    ops: tuple[Op, ...]

    @property
    def shape(self) -> Shape:
        """Shape of its entry."""
        return shape_after(self.ops, self.atom.shape)
