"""Values of an atom, row by row: read from its file, cut out, decoded; nothing held whole.

Selections are views on the file, rows in another order are gathered as they are asked for, and what
acts on each row alone is applied last. So only the rows asked for are read and decoded:

    FP8   to BF16, as it was made: w = codes * scale, the scale of a row being that of its 128-row
          block in the *stored* tensor, also where a cut does not fall on a block's edge
    ggml  blocks of Q4_K and the like to float32

How many rows at once follows from the memory that a caller may use: `chunks` counts what reading
takes by itself (`read_cost`), and what the caller does with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.layout import FP8_TYPES, Atom
from formats.family.ops import (
    VIEWS,
    Op,
    Regroup,
    Rows,
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

ROOM = 8 << 20
MOVES = (Regroup, Tile, Rows)
BLOCK = 128
NATIVE = frozenset(
    {
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "MXFP4",
        "IQ4_NL",
        "IQ4_XS",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }
)


@dataclass(frozen=True, slots=True)
class Value:
    """An atom opened for reading.

    shape     of the whole
    data      its rows as stored; of ggml's blocks the bytes, [R, bytes of a row]. Without bytes
              (torch's meta device) if those are elsewhere: `stored` brings them
    scale     for FP8 the rows of the grid of scales, float32 [G, 1 or ceil(K / 128)]
    grid      for FP8 which of them each row of `data` has, int64 [R]
    blocks    what is stored, if the rows are blocks of a ggml type; None: they are numbers
    order     which row of `data` comes to each place; None: as they are
    late      what is applied to decoded rows
    """

    source: Checkpoint
    atom: Atom
    shape: Shape
    data: Tensor
    scale: Tensor | None
    grid: Tensor | None = None
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
        return self._take(self._index(start, stop))

    def pick(self, index: Tensor) -> Tensor:
        """Return these rows, in float32 what was quantised."""
        return self._take(index if self.order is None else self.order[index])

    def codes(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop as they are stored."""
        return self.stored(self._index(start, stop))

    def scales(self, start: int, stop: int) -> Tensor:
        """Return the scales of rows start to stop, float32 [n, 1 or ceil(K / 128)]."""
        assert self.scale is not None, "only FP8 weights have scales"
        assert self.grid is not None, "a scale comes with its grid"
        return self.scale[self.grid[self._index(start, stop)]]

    def _index(self, start: int, stop: int) -> slice | Tensor:
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def _take(self, index: slice | Tensor) -> Tensor:
        if self.blocks is not None:
            from quant.ggml.codec import decode

            part = decode(self.blocks.dtype, self.stored(index), self.blocks.shape[-1])
        else:
            part = self.stored(index)
            if self.scale is not None:
                assert self.grid is not None, "a scale comes with its grid"
                part = decode_rows(part, self.scale[self.grid[index]])
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

    def chunks(
        self, multiple: int = BLOCK, *, held: int = 2, room: int = ROOM
    ) -> Iterator[tuple[int, int]]:
        """Yield row ranges whose starts are multiples of `multiple`.

        held  bytes that the caller holds of each element beside what was read
        room  bytes that a range may take in all; the least range may take more
        """
        count, width = self.shape[0], prod(self.shape[1:])
        each = width * (read_cost(self.info, moved=self._moved()) + held)
        step = max(1, room // max(1, each) // multiple) * multiple
        for start in range(0, count, step):
            yield start, min(start + step, count)

    @property
    def info(self) -> TensorInfo:
        """What the header says of the tensor that the atom is in."""
        return self.source.infos()[self.atom.stored]

    def _moved(self) -> bool:
        return self.order is not None or bool(self.late)

    def release(self, start: int, stop: int) -> None:
        """Say that these rows have been read, so that their pages can be given back."""
        self.source.release(self.data[start:stop].nbytes)


def read_cost(info: TensorInfo, *, moved: bool) -> int:
    """Return the bytes that reading takes for each element: mapped, decoded, and on the way there.

    moved  its rows are gathered, or something is done to them after decoding
    """
    if info.dtype in FP8_TYPES:  # codes, also widened; their scales; the product; BF16
        return 1 + 3 * 4 + 2 + (4 if moved else 0)
    if info.dtype not in DTYPE_BYTES:
        return (5 if info.dtype in NATIVE else 40) + (4 if moved else 0)
    size = DTYPE_BYTES[info.dtype]
    return size + (size + 4 if moved else 0)


def open_value(source: Checkpoint, atom: Atom, ops: Sequence[Op] = ()) -> Value:
    """Open an atom for reading by rows (its leading axis), after further operations if given."""
    stored, info = source.read(atom.stored), source.infos()[atom.stored]
    views, moves, late = _by_kind((*atom.ops, *ops))
    data = apply_all(views, stored)
    scale = grid = None
    if atom.scale is not None:
        lead = sum(isinstance(op, Unstack) for op in views)
        codes = apply_all(views[:lead], stored)
        scale = source.read(atom.scale)
        scale = apply_all(views[:lead], scale) if scale.dim() > 1 else scale
        scale = source.load(atom.scale, scale, ...)
        scale, grid = _scale_grid(codes, scale)
        grid = apply_all(views[lead:], grid)
    blocks = None if info.dtype in DTYPE_BYTES else info
    shape = shape_after(tuple(ops), atom.shape)
    return Value(source, atom, shape, data, scale, grid, blocks, _order(moves, len(data)), late)


def _by_kind(ops: Sequence[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]:
    """Part operations: cuts of the stored tensor, moves of whole rows, what a row does alone.

    Moves may be taken before what a row does alone: neither changes what the other does. A cut that
    follows a move is one of the moves.
    """
    views = list(takewhile(lambda op: isinstance(op, VIEWS) or op == Unsqueeze(0), ops))
    rest = ops[len(views) :]
    moves = [op for op in rest if isinstance(op, MOVES) and getattr(op, "axis", 0) == 0]
    late = [op for op in rest if op not in moves]
    assert not any(isinstance(op, Unstack) for op in late), "stacks are taken apart first"
    return tuple(views), tuple(moves), tuple(late)


def _order(moves: Sequence[Op], count: int) -> Tensor | None:
    """Return which of `count` rows comes to each place."""
    import torch

    return apply_all(tuple(moves), torch.arange(count)) if moves else None


def _scale_grid(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales in float32 [G, blocks], and which of them each row of codes [R, K] has."""
    import torch

    rows, columns = codes.shape
    if scale.dim() < 2:
        return scale.float().reshape(1, 1), torch.zeros(rows, dtype=torch.int64)
    if scale.shape == (rows, 1) != (-(-rows // BLOCK), -(-columns // BLOCK)):
        return scale.float(), torch.arange(rows)
    return scale.float(), torch.arange(rows) // BLOCK


def decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes [n, K] times scale [n, 1 or ceil(K / 128)] in float32."""
    columns = codes.shape[1]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * scale
