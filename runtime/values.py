"""Values of an atom, row by row: read from its file, cut out, decoded; nothing held whole.

Selections are views on the file, rows in another order are gathered as they are asked for, and what
acts on each row alone is applied last. So only the rows asked for are read and decoded:

    FP8   to BF16, as it was made: w = codes * scale, the scale of a row being that of its 128-row
          block in the *stored* tensor, also where a cut does not fall on a block's edge
    ggml  blocks of Q4_K and the like to float32
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.layout import Atom
from formats.ops import (
    VIEWS,
    Op,
    Regroup,
    Shape,
    Tile,
    Unsqueeze,
    Unstack,
    apply_all,
    shape_after,
)
from formats.tensor import DTYPE_BYTES, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from formats.remote import Index

CHUNK_BYTES = 4 << 20
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Value:
    """An atom opened for reading.

    shape     of the whole
    data      its rows as stored; of ggml's blocks the bytes, [R, bytes of a row]. Without bytes
              (torch's meta device) if those are elsewhere: `stored` brings them
    scale     for FP8 the scale of each row
    blocks    what is stored, if the rows are blocks of a ggml type; None: they are numbers
    order     which stored row comes to each place; None: as they are
    late      what is applied to decoded rows
    """

    source: Checkpoint
    atom: Atom
    shape: Shape
    data: Tensor
    scale: Tensor | None
    blocks: TensorInfo | None = None
    order: Tensor | None = None
    late: tuple[Op, ...] = ()

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop in the atom's dtype."""
        import torch

        exact = self.exact(start, stop)
        return exact if self.scale is None else exact.to(torch.bfloat16)

    def exact(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop, in float32 what was quantised."""
        return self._take(slice(start, stop) if self.order is None else self.order[start:stop])

    def pick(self, index: Tensor) -> Tensor:
        """Return these rows, in float32 what was quantised."""
        return self._take(index if self.order is None else self.order[index])

    def _take(self, index: slice | Tensor) -> Tensor:
        if self.blocks is not None:
            from quant.ggml import decode

            part = decode(self.blocks.dtype, self.stored(index), self.blocks.shape[-1])
        else:
            part = self.stored(index)
            part = part if self.scale is None else decode_rows(part, self.scale[index])
        return apply_all(self.late, part)

    def stored(self, index: Index) -> Tensor:
        """Return rows as they are stored."""
        import torch

        if self.scale is None:
            return self.source.load(self.atom.stored, self.data, index)
        codes = self.source.load(self.atom.stored, self.data.view(torch.uint8), index)
        return codes.view(self.data.dtype)

    def all(self) -> Tensor:
        """Return the whole atom."""
        return self.rows(0, self.shape[0])

    def chunks(self, multiple: int = BLOCK) -> Iterator[tuple[int, int]]:
        """Yield row ranges of about 4 MB whose starts are multiples of `multiple`."""
        count, width = self.shape[0], self._row_bytes()
        step = max(1, CHUNK_BYTES // max(1, width) // multiple) * multiple
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def _row_bytes(self) -> int:
        """Return the bytes of a row as stored, or decoded where that is more."""
        decoded = DTYPE_BYTES["F32"] * prod(self.shape[1:])
        stored: int = self.data[0].numel() * self.data.element_size()
        return stored if self.blocks is None else decoded

    def release(self, start: int, stop: int) -> None:
        """Say that these rows have been read, so that their pages can be given back."""
        self.source.release(self.data[start:stop].nbytes)


def open_value(source: Checkpoint, atom: Atom, ops: Sequence[Op] = ()) -> Value:
    """Open an atom for reading by rows (its leading axis), after further operations if given."""
    stored, info = source.read(atom.stored), source.infos()[atom.stored]
    views, moves, late = _by_kind((*atom.ops, *ops))
    if any(isinstance(op, Regroup) for op in views):  # which copies, so that it needs the bytes
        stored = source.load(atom.stored, stored, ...)
    data = apply_all(views, stored)
    scale = None
    if atom.scale is not None:
        lead = sum(isinstance(op, Unstack) for op in views)
        codes = apply_all(views[:lead], stored)
        scale = source.read(atom.scale)
        scale = apply_all(views[:lead], scale) if scale.dim() > 1 else scale
        scale = source.load(atom.scale, scale, ...)
        scale = apply_all(views[lead:], _scale_of_rows(codes, scale))
    blocks = None if info.dtype in DTYPE_BYTES else info
    shape = shape_after(tuple(ops), atom.shape)
    return Value(source, atom, shape, data, scale, blocks, _order(moves), late)


def _by_kind(ops: Sequence[Op]) -> tuple[tuple[Op, ...], list[Tile], tuple[Op, ...]]:
    """Part operations: cuts of the stored tensor, moves of whole rows, what a row does alone.

    Moves may be taken before what a row does alone: neither changes what the other does.
    """
    views = [op for op in ops if isinstance(op, (*VIEWS, Regroup)) or op == Unsqueeze(0)]
    moves = [op for op in ops if isinstance(op, Tile) and op.axis == 0]
    late = [op for op in ops if op not in views and op not in moves]
    assert list(ops[: len(views)]) == views, "cuts come first"
    return tuple(views), moves, tuple(late)


def _order(moves: Sequence[Tile]) -> Tensor | None:
    order = None
    for move in moves:
        order = move.order() if order is None else order[move.order()]
    return order


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
    """Return codes [n, K] times scale [n, 1 or ceil(K / 128)] in float32."""
    columns = codes.shape[1]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * scale
