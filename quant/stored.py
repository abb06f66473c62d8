"""Values of an atom, row by row: read from its parts, cut out, decoded; nothing held whole.

`opening` opens one. Rows in another order are gathered as they are asked for, and what acts on each
row alone is applied last. So only the rows asked for are read and decoded. A part of which several
rows share one (the scale of a block) follows the *stored* rows, also where a cut does not fall on a
block's edge.

How many rows at once follows from the memory that a caller may use: `chunks` counts what reading
takes by itself (`Scheme.cost`), and what the caller does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, cast

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.moves import Tile
from formats.family.ops import Op, Shape, apply_all
from quant.part import Cost, Part
from quant.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from formats.remote import Index

CHUNK_BYTES = 8 << 20
ROW_MULTIPLE = 128


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

        several = self.first.packed
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
        whole = len(self.data) * self.first.packed
        self.source.release(self.data.nbytes * (stop - start) // max(1, whole))


def scheme_of(atom: Atom) -> Scheme:
    """Return an atom's stored form as what it is above `formats`: a scheme."""
    return cast("Scheme", atom.form)


def _indexable(data: Tensor) -> Tensor:
    """Return a view that torch can gather rows of: it cannot those of FP8."""
    import torch

    one_byte = data.dtype.itemsize == 1
    return data.view(torch.uint8) if one_byte and data.dtype.is_floating_point else data


def _at(data: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of a tensor of any type."""
    return _indexable(data)[rows].view(data.dtype)


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
