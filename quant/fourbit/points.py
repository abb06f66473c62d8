"""Points, signs and levels of IQ2 and IQ3, taken out of blocks and put back: see `point_fields`.

Shape letters: N rows, K columns, B bytes of a row, S super-blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quant.fourbit.point_fields import EIGHT, FIELDS, SUPER, Run
from quant.ggml import codec, kinds
from quant.ggml.i_grids import levels

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(slots=True)
class Points:
    """What blocks hold, of N rows.

    base    float32 [N, K / 256]
    level   int32 [N, K / block], l
    point   int32 [N, K / group], numbers of points
    sign    uint8 [N, K / 8], of eight columns a bit for each minus
    """

    base: NDArray[np.float32]
    level: NDArray[np.int32]
    point: NDArray[np.int32]
    sign: NDArray[np.uint8]

    def steps(self, block: int) -> NDArray[np.float32]:
        """Return base (2 l + 1) of each eight columns, [N, K / 8]."""
        wide = np.repeat(self.base, SUPER // block, 1) * (2 * self.level + 1)
        return np.ascontiguousarray(np.repeat(wide, block // EIGHT, 1), np.float32)


def take_points(name: str, blocks_NB: Tensor) -> Points:
    """Return what blocks hold, uint8 [N, B]."""
    fields, rows = FIELDS[name], len(blocks_NB)
    stored = blocks_NB.contiguous().numpy().reshape(-1, kinds.block(name)[1])
    bits = np.unpackbits(stored, axis=1, bitorder="little")
    level, point, sign = (_take(bits, f) for f in (fields.levels, fields.points, fields.signs))
    if fields.even:
        sign |= (np.bitwise_count(sign).astype(np.int32) & 1) << 7
    return Points(
        _base(name, blocks_NB), level.reshape(rows, -1), point.reshape(rows, -1),
        sign.reshape(rows, -1).astype(np.uint8),
    )  # fmt: skip


def _base(name: str, blocks_NB: Tensor) -> NDArray[np.float32]:
    """Return what the lowest level of a point is worth in each super-block, [N, K / 256]."""
    fields, columns = FIELDS[name], kinds.columns(name, blocks_NB.shape[1])
    rows, blocks = len(blocks_NB), columns // SUPER
    base = np.zeros((rows, blocks), np.float32)
    level = np.zeros((rows, columns // fields.block), np.int32)
    point = np.zeros((rows, columns // fields.group), np.int32)
    sign = np.zeros((rows, columns // EIGHT), np.uint8)
    lowest = put_points(name, blocks_NB, Points(base, level, point, sign))
    ones = codec.decode(name, lowest, columns)[:, ::SUPER] / float(levels(name)[0, 0])
    return np.ascontiguousarray(ones.numpy())


def put_points(name: str, blocks_NB: Tensor, points: Points) -> Tensor:
    """Return the blocks with these levels, points and signs in place of theirs."""
    import torch

    fields, size = FIELDS[name], kinds.block(name)[1]
    stored = blocks_NB.contiguous().numpy().reshape(-1, size)
    bits = np.unpackbits(stored, axis=1, bitorder="little")
    _put(bits, fields.levels, points.level)
    _put(bits, fields.points, points.point)
    _put(bits, fields.signs, points.sign.astype(np.int32))
    packed = np.packbits(bits, axis=1, bitorder="little")
    return torch.from_numpy(packed).view(blocks_NB.shape)


def _take(bits: NDArray[np.uint8], numbers: tuple[tuple[Run, ...], ...]) -> NDArray[np.int32]:
    """Return numbers, int32 [S, of them], from bits [S, of a super-block]."""
    out = np.zeros((len(bits), len(numbers)), np.int32)
    for runs in zip(*numbers, strict=True):
        starts = np.array([run.start for run in runs])
        for k in range(runs[0].width):
            out |= bits[:, starts + k].astype(np.int32) << (runs[0].low + k)
    return out


def _put(
    bits: NDArray[np.uint8], numbers: tuple[tuple[Run, ...], ...], values: NDArray[np.int32]
) -> None:
    """Write numbers [S, of them], or [N, more], into bits."""
    values = values.reshape(len(bits), len(numbers))
    for runs in zip(*numbers, strict=True):
        starts = np.array([run.start for run in runs])
        for k in range(runs[0].width):
            bits[:, starts + k] = values >> (runs[0].low + k) & 1
