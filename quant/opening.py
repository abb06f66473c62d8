"""Opening an atom for reading: its parts cut to the rows that it has, and the order they come in.

Selections are views on the files; nothing is read but the parts that rows share, which are small.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from formats.family.moves import VIEWS, Regroup, Rows, Tile, Unsqueeze, Unstack
from formats.family.ops import apply_all, shape_after
from quant.stored import Shared, Value, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.checkpoint import Checkpoint
    from formats.family.layout import Atom
    from formats.family.ops import Op
    from quant.part import Part

MOVES = (Regroup, Tile, Rows)


def open_value(source: Checkpoint, atom: Atom, ops: Sequence[Op] = ()) -> Value:
    """Open an atom for reading by rows (its leading axis), after further operations if given."""
    views, moves, late = _by_kind((*atom.ops, *ops))
    whole = source.infos()[atom.stored].shape
    first, *others = scheme_of(atom).parts(atom.stored, whole)
    data = _turned(source, atom.stored, first)
    count = data.shape[-2 if len(whole) > 1 else 0] * first.packed
    if first.unpack is None:
        data = apply_all(views, data)
    else:  # what is cut are rows of the weight, not of the words that hold them
        views, moves = (), (*views, *moves)
    shared = {
        part.key: _open_shared(source, name, part, count, views)
        for part, name in zip(others, atom.parts[1:], strict=True)
        if part.constant is None
    }
    order = _order(moves, len(data) * first.packed)
    return Value(
        source, atom, shape_after(tuple(ops), atom.shape), first, data, shared, order, late
    )


def check_scales(value: Value) -> None:
    """Refuse scales that cannot be right, with their place in the source. QuantError."""
    shared = {key: part.data for key, part in value.shared.items()}
    value.scheme.check_scales(shared, _ranges_of_source(value))


def _ranges_of_source(value: Value) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    """Yield the first row, and rows of each part, in the order of the source."""
    plain = open_value(value.source, value.atom)
    for start, stop in plain.chunks(1):
        yield start, plain.stored(start, stop)


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
