"""Values of an atom, row by row: read from its parts, cut out, decoded; nothing held whole.

Selections are views on the files, rows in another order are gathered as they are asked for, and
what acts on each row alone is applied last. So only the rows asked for are read and decoded. A part
of which several rows share one (the scale of a block) follows the *stored* rows, also where a cut
does not fall on a block's edge.

How many rows at once follows from the memory that a caller may use: `chunks` counts what reading
takes by itself (`Scheme.cost`), and what the caller does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING, cast

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.moves import VIEWS, Regroup, Rows, Tile, Unsqueeze, Unstack
from formats.family.ops import Op, Shape, apply_all, shape_after
from quant.scheme import Cost, Part, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from formats.remote import Index

CHUNK_BYTES = 8 << 20
ROW_MULTIPLE = 128
MOVES = (Regroup, Tile, Rows)


@dataclass(frozen=True, slots=True)
class Shared:
    """A part that rows share: `data`, and which of its rows each stored row of the weight has.

    `grid` is None where every row has all of it.
    """

    data: Tensor
    grid: Tensor | None


@dataclass(frozen=True, slots=True)
class Value:
    """An atom opened for reading.

    shape   of the whole
    first   the part that has the weight's rows, or several of them packed in each of its own
    data    its rows as stored. Without bytes (torch's meta device) if those are elsewhere
    shared  the other parts by key
    order   which stored row of the weight comes to each place; None: as they are
    late    what is applied to decoded rows
    """

    source: Checkpoint
    atom: Atom
    shape: Shape
    first: Part
    data: Tensor
    shared: Mapping[str, Shared] = field(default_factory=dict)
    order: Tensor | None = None
    late: tuple[Op, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How the weight is stored."""
        return scheme_of(self.atom)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop in the atom's dtype: what was quantised is rounded to it."""
        from formats.safetensors.file import torch_dtype

        exact = self.exact(start, stop)
        return exact.to(torch_dtype(self.atom.dtype)) if self.atom.quantized else exact

    def exact(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop, in float32 what was quantised."""
        return apply_all(self.late, self.scheme.decode(self.stored(start, stop)))

    def pick(self, index: Tensor) -> Tensor:
        """Return these rows, in float32 what was quantised."""
        order = index if self.order is None else self.order[index]
        return apply_all(self.late, self.scheme.decode(self._parts(order)))

    def stored(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what rows start to stop have of each part, as `Scheme.decode` takes it."""
        return self._parts(self._index(start, stop))

    def check_scales(self) -> None:
        """Refuse scales that cannot be right, with their place in the source. QuantError."""
        shared = {key: part.data for key, part in self.shared.items()}
        self.scheme.check_scales(shared, self._ranges_of_source())

    def _ranges_of_source(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yield the first row, and rows of each part, in the order of the source."""
        value = open_value(self.source, self.atom)
        for start, stop in value.chunks(1):
            yield start, value.stored(start, stop)

    def shared_rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return what rows start to stop have of one part, which is not the first."""
        return self._shared(key, self._index(start, stop))

    def in_stored_order(self, w: Tensor) -> Tensor:
        """Return rows of values with their columns in the order in which they are stored."""
        for op in reversed(self.late):
            assert isinstance(op, Tile), "encoded weights are only reordered"
            w = op.inverse().apply(w)
        return w

    def _parts(self, index: slice | Tensor) -> dict[str, Tensor]:
        own = {self.first.key: self._load(index)}
        return own | {key: self._shared(key, index) for key in self.shared}

    def _shared(self, key: str, index: slice | Tensor) -> Tensor:
        part = self.shared[key]
        return part.data if part.grid is None else _at(part.data, part.grid[index])

    def _index(self, start: int, stop: int) -> slice | Tensor:
        return slice(start, stop) if self.order is None else self.order[start:stop]

    def _load(self, index: Index) -> Tensor:
        """Return rows of the first part with their bytes."""
        if self.first.unpack is not None:
            return self._unpacked(index, self.first.unpack)
        data = _indexable(self.data)
        return self.source.load(self.atom.stored, data, index).view(self.data.dtype)

    def _unpacked(self, index: Index, unpack: Callable[[Tensor], Tensor]) -> Tensor:
        """Return rows of a first part that has several of them packed in each of its own."""
        import torch

        several = _several(self.first)
        wanted = torch.arange(len(self.data) * several)[index]
        words, place = torch.unique(wanted // several, return_inverse=True)
        rows = unpack(self.source.load(self.atom.stored, self.data, words))
        return rows[place * several + wanted % several]

    def all(self) -> Tensor:
        """Return the whole atom."""
        return self.rows(0, self.shape[0])

    def chunks(
        self, multiple: int = ROW_MULTIPLE, *, held: int = 2, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[int, int]]:
        """Yield row ranges whose starts are multiples of `multiple`.

        held         bytes that the caller holds of each element beside what was read
        chunk_bytes  what a range may take in all; the least range may take more
        """
        count, width = self.shape[0], prod(self.shape[1:])
        each = width * (self.cost().read + held)
        step = max(1, chunk_bytes // max(1, each) // multiple) * multiple
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def cost(self) -> Cost:
        """Return the bytes held for each element while this value is read."""
        return self.scheme.cost(moved=self.order is not None or bool(self.late))

    def release(self, start: int, stop: int) -> None:
        """Say that these rows have been read, so that their pages can be given back."""
        whole = len(self.data) * _several(self.first)
        self.source.release(self.data.nbytes * (stop - start) // max(1, whole))


def scheme_of(atom: Atom) -> Scheme:
    """Return an atom's stored form as what it is above `formats`: a scheme."""
    return cast("Scheme", atom.form)


def open_value(source: Checkpoint, atom: Atom, ops: Sequence[Op] = ()) -> Value:
    """Open an atom for reading by rows (its leading axis), after further operations if given."""
    views, moves, late = _by_kind((*atom.ops, *ops))
    whole = source.infos()[atom.stored].shape
    first, *others = scheme_of(atom).parts(atom.stored, whole)
    data = _turned(source, atom.stored, first)
    count = data.shape[-2 if len(whole) > 1 else 0] * _several(first)
    if first.unpack is None:
        data = apply_all(views, data)
    else:  # what is cut are rows of the weight, not of the words that hold them
        views, moves = (), (*views, *moves)
    shared = {
        part.key: _open_shared(source, name, part, count, views)
        for part, name in zip(others, atom.parts[1:], strict=True)
        if part.constant is None
    }
    order = _order(moves, len(data) * _several(first))
    return Value(
        source, atom, shape_after(tuple(ops), atom.shape), first, data, shared, order, late
    )


def _several(first: Part) -> int:
    """Return how many rows of the weight each row of its first part holds."""
    return (first.rows or 1) if first.unpack is not None else 1


def _turned(source: Checkpoint, name: str, part: Part) -> Tensor:
    """Return a part with the rows of the weight first; one that lies far away is brought whole."""
    data = source.read(name)
    if not part.transposed:
        return data
    return (source.load(name, data, ...) if data.is_meta else data).mT


def _open_shared(
    source: Checkpoint, name: str, part: Part, count: int, views: tuple[Op, ...]
) -> Shared:
    """Open a part that rows share, `count` in all; its bytes are few, and read now."""
    import torch

    lead = tuple(op for op in views if isinstance(op, Unstack)) if part.stacked else ()
    data = source.load(name, apply_all(lead, source.read(name)), ...)
    data = data.mT.contiguous() if part.transposed else data
    data = part.unpack(data) if part.unpack else data
    if part.rows is None:
        return Shared(data, None)
    cut = tuple(op for op in views if not isinstance(op, Unstack))
    return Shared(data, apply_all(cut, torch.arange(count) // part.rows))


def _indexable(data: Tensor) -> Tensor:
    """Return a view that torch can gather rows of: it cannot those of FP8."""
    import torch

    one_byte = data.dtype.itemsize == 1
    return data.view(torch.uint8) if one_byte and data.dtype.is_floating_point else data


def _at(data: Tensor, rows: Tensor) -> Tensor:
    return _indexable(data)[rows].view(data.dtype)


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


def each_row(
    scheme: Scheme, parts: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return encoded parts of a weight of this shape as `Scheme.decode` takes them: row by row."""
    import torch

    index, rows = torch.arange(shape[0]), {}
    for part in scheme.parts("", shape):
        if part.constant is None and not part.measured:
            data = part.unpack(parts[part.key]) if part.unpack else parts[part.key]
            shared = part.rows or 1
            rows[part.key] = data if shared == 1 else _at(data, index // shared)
    return rows
