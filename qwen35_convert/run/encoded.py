"""Read, encode and write the rows of one item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.safetensors.file import torch_dtype
from quant.errors import QuantError
from quant.opening import check_scales, open_value
from quant.part import Part
from quant.stored import Value
from qwen35_convert.planning.plan import Item
from qwen35_convert.run.finite import check_logarithms, describe_not_finite
from qwen35_convert.run.placed import Piece, Placed, shared_out
from qwen35_convert.run.worker import Worker
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from torch import Tensor


def convert_item(item: Item, source: Checkpoint, sink: FolderSink, worker: Worker) -> None:
    """Read, encode and write one item."""
    value = open_value(source, item.atom, item.ops)
    with naming(item, source):
        check_logarithms(source, item)
        check_scales(value)
        _encode(value, item, sink, worker)


@contextmanager
def naming(item: Item, source: Checkpoint) -> Iterator[None]:
    """Name the tensor in a QuantError."""
    try:
        yield
    except QuantError as failure:
        file = source.position(item.atom.stored)[0]
        why: object = failure
        with suppress(QuantError):  # it may be that the source cannot be decoded
            why = describe_not_finite(source, item.atom) or failure
        raise QuantError(f"{item.atom.stored} ({item.atom.name}) in {file}: {why}") from None


def _encode(value: Value, item: Item, sink: FolderSink, worker: Worker) -> None:
    held = item.scheme.cost(moved=True).write
    for rows in encoded_rows(value, item, worker, held):
        for output, start, data in rows.outputs:
            sink.write(output.name, output.offset + start, data)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some rows of a weight, what its scheme stores of them, and where that belongs.

    outputs  each output with the byte of it at which these bytes begin; where columns come first
             they may come with later rows
    """

    w: Tensor
    parts: Mapping[str, Tensor]
    outputs: Sequence[Piece]


def encoded_rows(value: Value, item: Item, worker: Worker, held: int) -> Iterator[Encoded]:
    """Encode an item's rows, as many at once as the worker has memory for.

    held  bytes that the caller holds of each element
    """
    scheme, form = item.scheme, value.scheme
    carried = scheme.carries(form, value.late)
    prepared = None if carried else worker.prepared.of(item)
    stored = scheme.parts("", value.shape)
    room, chunk_bytes = shared_out(stored, worker.chunk_bytes)
    placed, constant = Placed(item.outputs, stored, room), _constants(stored)
    if scheme.static_inputs:
        constant |= scheme.scale_inputs(worker.inputs[item.atom.name])
    for start, stop in value.chunks(scheme.row_multiple, held=held, chunk_bytes=chunk_bytes):
        w = value.exact(start, stop).to(worker.device)
        parts = constant | (
            scheme.carry(form, value.stored(start, stop), value.late)
            if carried
            else worker.encode(item, w, prepared)
        )
        yield Encoded(w, parts, placed.pieces(parts))
        value.release(start, stop)


def _constants(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Return the parts that follow from the shape."""
    import torch

    return {
        part.key: torch.tensor(part.constant, dtype=torch_dtype(part.info.dtype))
        for part in parts
        if part.constant is not None
    }
