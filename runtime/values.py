"""Values of an atom, row by row: read from its file, cut out, dequantised; nothing held whole.

Selections are views on the file, so that only the rows asked for are read. An FP8 source is decoded
a few rows at a time, to BF16: w = codes * scale, the scale of a row being that of its 128-row block
in the *stored* tensor, also where a cut does not fall on a block's edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.layout import Atom
from formats.ops import Unstack, apply_all

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 4 << 20
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Value:
    """An atom opened for reading: its rows as stored, and for FP8 the scale of each row."""

    source: Checkpoint
    atom: Atom
    data: Tensor
    scale: Tensor | None

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop in the atom's dtype."""
        part = self.data[start:stop]
        return part if self.scale is None else decode_rows(part, self.scale[start:stop])

    def all(self) -> Tensor:
        """Return the whole atom."""
        return self.rows(0, self.data.shape[0])

    def chunks(self, multiple: int = BLOCK) -> Iterator[tuple[int, int]]:
        """Yield row ranges of about 4 MB whose starts are multiples of `multiple`."""
        count, width = self.data.shape[0], self.data[0].numel() * self.data.element_size()
        step = max(1, CHUNK_BYTES // max(1, width) // multiple) * multiple
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def release(self, start: int, stop: int) -> None:
        """Say that these rows have been read, so that their pages can be given back."""
        self.source.release(self.data[start:stop].nbytes)


def open_value(source: Checkpoint, atom: Atom) -> Value:
    """Open an atom for reading by rows (its leading axis)."""
    stored = source.read(atom.stored)
    if atom.scale is None:
        return Value(source, atom, apply_all(atom.ops, stored), None)
    scale = source.read(atom.scale)
    lead = sum(isinstance(op, Unstack) for op in atom.ops)
    codes, ops = apply_all(atom.ops[:lead], stored), atom.ops[lead:]
    if scale.dim() > 1:
        scale = apply_all(atom.ops[:lead], scale)
    return Value(source, atom, apply_all(ops, codes), apply_all(ops, _scale_of_rows(codes, scale)))


def _scale_of_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return one row of scales [R, blocks] for each row of codes [R, K]."""
    import torch

    rows, columns = codes.shape
    if scale.dim() < 2:
        return scale.float().reshape(1, 1).expand(rows, 1)
    if scale.shape == (rows, 1) != (-(-rows // BLOCK), -(-columns // BLOCK)):
        return scale.float()
    return scale.float()[torch.arange(rows) // BLOCK]


def decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes [n, K] times scale [n, 1 or ceil(K / 128)] as BF16, rounded once."""
    import torch

    columns = codes.shape[1]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.float() * scale).to(torch.bfloat16)
