"""In which order an artifact holds its source's rows: found by matching, told in words.

Each row of the artifact is matched with the source's row that is most like it. Rows are compared by
SKETCH random projections of theirs, which keep cosines to about 1 / sqrt(SKETCH); only the matches
are then compared in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.family.moves import Tile
from formats.gguf.names import ops_to_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

SKETCH, MAX_ROWS, CHUNK = 64, 1 << 15, 1024
# Two bits leave a cosine of 0.95; rows that are independent have 0 +- 1 / sqrt(columns).
ALIKE = 0.8
MAX_RUNS = 4

Run = tuple[int, int, int]


def find_order(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """Return which source row each row is, int64 [N]; None if one row in ten is like no other.

    Both [N, ...]; scalars are matched by their order. None too for more rows than MAX_ROWS.
    """
    import torch

    if len(ours) > MAX_ROWS or ours.shape != theirs.shape:
        return None
    if ours.dim() == 1:
        order = torch.empty(len(ours), dtype=torch.int64)
        order[ours.argsort()] = theirs.argsort()
        return order if torch.allclose(theirs[order], ours, rtol=0.01) else None
    left, right = (_unit(t.flatten(1)) for t in (ours, theirs))
    draw = torch.Generator().manual_seed(0)
    projection = torch.randn(left.shape[1], SKETCH, generator=draw)
    sketches = _unit(left @ projection), _unit(right @ projection)
    chunks = torch.split(sketches[0], CHUNK)
    order = torch.cat([(rows @ sketches[1].T).argmax(1) for rows in chunks])
    alike = (left * right[order]).sum(1) > ALIKE
    distinct = len(torch.unique(order)) > 0.9 * len(order)
    return order if distinct and bool(alike.float().mean() > 0.9) else None


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / x.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit


def describe(order: Tensor, role: str, sizes: Mapping[str, int], what: str = "rows") -> str | None:
    """Say what an order is; None if it is the source's own."""
    import torch

    if torch.equal(order, torch.arange(len(order))):
        return None
    head = f"holds the source's {what} in another order"
    tiled = _as_tiled(order, role, sizes, 0 if what == "rows" else 1)
    if tiled:
        return f"{head}: {tiled}"
    moved = [run for run in _runs(order) if run[0] != run[2]]
    if len(moved) <= MAX_RUNS:
        lines = [f"{a}..{b} are the source's {c}..{c + b - a}" for a, b, c in moved]
        return f"{head}: {what} {', '.join(lines)}"
    first = moved[0]
    count = int((order != torch.arange(len(order))).sum())
    return f"{head}: {count} are moved, {first[0]} is the source's {first[2]}"


def _runs(order: Tensor) -> Iterator[Run]:
    """Yield (first, last, source's first) of rows that follow each other on both sides."""
    start = 0
    places = order.tolist()
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield start, i - 1, places[start]
            start = i


def _as_tiled(order: Tensor, role: str, sizes: Mapping[str, int], axis: int) -> str | None:
    """Recognise GGUF's order of the value heads, or what is left of it where it was not used."""
    import torch

    for op in ops_to_gguf(role, sizes) if "NV" in sizes else ():
        if isinstance(op, Tile) and op.axis == axis:
            if torch.equal(op.order(), order):
                return "value heads are tiled, as GGUF has them"
            if torch.equal(op.inverse().order(), order):
                return "value heads were not tiled, but are read as if they were"
    return None
