"""Weights of four bits from a checkpoint, packed as the kernels read them.

NVFP4 is packed, and INT4 in groups of 32, 64 or 128 columns without zero points; another stored
form, columns that were reordered, and weights whose parts are of several forms are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from quant.fourbit.int4 import Int4
from quant.fourbit.nvfp4 import Nvfp4
from quant.fourbit.parts import GLOBAL, PACKED, SCALE
from quant.stored import Value
from runtime.kernels.conditions import HOPPER
from runtime.kernels.linear.packed import (
    INT4_GROUPS,
    PackedWeight,
    packed_int4,
    packed_nvfp4,
)


def takes_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products with packed weights run there: on a GPU, Hopper's in BF16."""
    if device.type != "cuda":
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == HOPPER


def packed_group(values: Iterable[Value]) -> int | None:
    """Return the group that all of these can be packed with, or None; 16 is NVFP4's."""
    groups = {_group(value) for value in values}
    return groups.pop() if len(groups) == 1 else None


def pack(
    shape: tuple[int, ...], groups: Iterable[Sequence[Value]], device: torch.device
) -> PackedWeight:
    """Return the weight of this shape: each group of values is one of a stack, or there is one.

    Rows are read a few megabytes at a time.
    """
    *lead, rows, columns = shape
    whole: PackedWeight | None = None
    for expert, values in enumerate(groups):
        at = 0
        for piece in _pieces(values, device):
            whole = whole or _room(piece, (*lead, rows, columns))
            one, end = whole[expert] if lead else whole, at + len(piece.row)
            one.words[:, at:end] = piece.words
            one.scale[:, at:end] = piece.scale
            one.row[at:end] = piece.row
            at = end
    assert whole is not None, "a weight has rows"
    return whole


def _room(piece: PackedWeight, shape: tuple[int, ...]) -> PackedWeight:
    """Return a weight of this shape, stored as some rows of it are; nothing is written."""
    *lead, rows, columns = shape
    words, scale = (
        x.new_empty((*lead, x.shape[0], rows, x.shape[2])) for x in (piece.words, piece.scale)
    )
    return PackedWeight(words, scale, piece.row.new_empty((*lead, rows)), columns)


def _group(value: Value) -> int | None:
    scheme = value.scheme
    if value.late:
        return None
    if isinstance(scheme, Nvfp4):
        return scheme.group
    if not isinstance(scheme, Int4) or scheme.bits != 4 or scheme.ordered or not scheme.symmetric:
        return None
    return scheme.group if scheme.group in INT4_GROUPS else None


def _pieces(values: Sequence[Value], device: torch.device) -> Iterator[PackedWeight]:
    """Yield rows of values, one below the other, and give their pages back."""
    for value in values:
        for first, last in value.chunks():
            rows = {key: part.to(device) for key, part in value.stored(first, last).items()}
            yield _nvfp4(value.scheme, rows) if isinstance(value.scheme, Nvfp4) else _int4(rows)
        value.release(0, value.shape[0])


def _nvfp4(scheme: Nvfp4, rows: dict[str, Tensor]) -> PackedWeight:
    whole = rows[GLOBAL].float().reshape(())
    step = whole if scheme.spelling.multiplies else 1 / whole
    return packed_nvfp4(_nibbles(rows[PACKED]), rows[SCALE], step.expand(len(rows[PACKED])))


def _int4(rows: dict[str, Tensor]) -> PackedWeight:
    codes = _nibbles(rows[PACKED].contiguous().view(torch.uint8)).view(torch.int8) - 8
    return packed_int4(codes, rows[SCALE])


def _nibbles(packed_NH: Tensor) -> Tensor:
    """Return the codes [N, 2 H] of bytes, the lower four bits first."""
    return torch.stack([packed_NH & 15, packed_NH >> 4], -1).flatten(1)
