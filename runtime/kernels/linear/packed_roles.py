"""33 to 64 rows times NVFP4 weights, by warps with roles: some load, some multiply.

Chosen for: `PRODUCT`, `UPDATE` and `GATED` of 33 to 64 rows with NVFP4 weights on Hopper.

    y[m, n] = sum_k x[m, k] * w[n, k]                   summed in float32, rounded once; see packed
    parts     of the sums over K, in float32, which the next norm adds (norm.rms)
    gated     silu(gate) * up, each step rounded to x's dtype

What a program computes is in packed_roles_tile, how warps work together in ring. The rows of x are
read again by every program, so tiles are as tall as keeps the multiprocessors busy at once.

x is first lined up (encode.lined), by the kernel that makes it where it can.

H200, 64 rows of 27B, with the norm, microseconds: gate and up 61, down 31, rule 26, out 15.
What counts is how many blocks a program has: 0.5 us each for a chunk.

Shape letters: M rows of x, N outputs, K inputs, F inner size of a feed-forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.encode.lined import Lined, lined_up
from runtime.kernels.launch import power_of_two
from runtime.kernels.linear.packed import CHUNK, NVFP4_GROUP, WORDS
from runtime.kernels.linear.packed_roles_tile import kernel
from runtime.kernels.norm.rms import Parts
from runtime.kernels.overlap import early
from runtime.kernels.ring import PARTS, tiles

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.encode.rows import Codes
    from runtime.kernels.linear.packed import PackedWeight

MOST_ROWS, _FEWEST_ROWS = 64, 8
_PLACES = 132  # multiprocessors of an H200
_BLOCK = 64  # rows of the weight
_MOST_BLOCKS = 5
_MOST_PARTS = 6
_BLOCKS_OF_PARTS = 4
_BOX = 32  # rows of the weight in a copy
_CHIP = 225 << 10  # bytes of a multiprocessor for the rings
_TURNS = 2  # chunks of x on the chip
_MOST_STAGES = 8
# two groups of warps that multiply, and one that loads
_OPTIONS = {"TURNS": _TURNS, "MULTIPLY": 232, "LOAD": 40, **PARTS}


class Tile(NamedTuple):
    """How a weight is divided among programs.

    blocks  of 64 rows in a tile
    parts   of the chunks of columns
    """

    blocks: int
    parts: int = 1

    @staticmethod
    def whole(rows: int) -> Tile:
        """Return the lowest tile with which all programs run at once, or the tallest."""
        fits = (b for b in range(2, _MOST_BLOCKS) if -(-rows // (_BLOCK * b)) <= _PLACES)
        return Tile(next(fits, _MOST_BLOCKS))

    @staticmethod
    def parted(rows: int, chunks: int) -> Tile:
        """Return a tile where the sums may be split."""
        blocks = min(_BLOCKS_OF_PARTS, max(2, -(-rows // _BLOCK) // 16))
        parts = max(1, min(_MOST_PARTS, _PLACES // -(-rows // (_BLOCK * blocks)), chunks))
        return Tile(blocks, -(-chunks // -(-chunks // parts)))

    def options(self, block_m: int) -> dict[str, int]:
        """Return launch options."""
        stage = self.blocks * _BLOCK * (WORDS * 4 + CHUNK // NVFP4_GROUP)
        stages = (_CHIP - _TURNS * block_m * CHUNK * 2) // stage
        return {
            "MORE": -(-self.blocks // 2),
            "FEWER": self.blocks // 2,
            "STAGES": min(stages, _MOST_STAGES),
            "BLOCK_M": block_m,
            **_OPTIONS,
        }


def nvfp4_rows(x_MK: Tensor, weight: PackedWeight, codes: Codes | Lined | None = None) -> Tensor:
    """Return x @ weight.T [M, N] in x's dtype.

    x_MK   [M, K], M at most 64, rows contiguous in themselves
    codes  x lined up, if there is such
    """
    y_MN = x_MK.new_empty((x_MK.shape[0], weight.shape[0]))
    launch(_lined(x_MK, codes), weight, y_MN, Tile.whole(weight.shape[0]))
    return y_MN


def nvfp4_parts(x_MK: Tensor, weight: PackedWeight) -> Parts:
    """Return x @ weight.T [M, N] as parts of its sums."""
    return lined_parts(lined_up(x_MK), weight)


def lined_parts(lined: Lined, weight: PackedWeight) -> Parts:
    """Return `nvfp4_parts` of x that is lined up."""
    n, tile = weight.shape[0], Tile.parted(weight.shape[0], weight.chunks)
    x = lined.values
    sums_PMN = x.new_empty((tile.parts, x.shape[0], n), dtype=torch.float32)
    launch(x, weight, sums_PMN, tile)
    return Parts(sums_PMN)


def nvfp4_gated(x_MH: Tensor, gate_up: PackedWeight, codes: Codes | Lined | None = None) -> Tensor:
    """Return silu(gate) * up [M, F] of [gate | up] = x gate_up^T.

    gate_up  [2F, H], gate rows first
    codes    x lined up, if there is such
    """
    y_MF = x_MH.new_empty((x_MH.shape[0], gate_up.shape[0] // 2))
    launch(_lined(x_MH, codes), gate_up, y_MF, Tile.whole(gate_up.shape[0]), gated=True)
    return y_MF


def lined_gated(x_MH: Tensor, gate_up: PackedWeight, codes: Codes | Lined | None) -> Lined:
    """Return `nvfp4_gated` lined up."""
    y, x = (
        Lined.room(x_MH.shape[0], gate_up.shape[0] // 2, x_MH),
        _lined(x_MH, codes),
    )
    launch(x, gate_up, y.values, Tile.whole(gate_up.shape[0]), gated=True, lined=True)
    return y


def _lined(x_MK: Tensor, codes: Codes | Lined | None) -> Tensor:
    lined = codes if isinstance(codes, Lined) else lined_up(x_MK)
    return lined.values


def launch(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    tile: Tile,
    *,
    gated: bool = False,
    lined: bool = False,
) -> None:
    """Fill `out`: [M, N], [P, M, N] or gated [M, F], whose columns may be lined up.

    x      [M, C * 256] lined up
    lined  so are the columns of `out`
    """
    (m, width), n = x.shape, weight.shape[0]
    assert m <= MOST_ROWS, f"these kernels are for {MOST_ROWS} rows or fewer"
    assert width == weight.chunks * CHUNK, "as many columns as x has"
    options = tile.options(max(_FEWEST_ROWS, power_of_two(m)))
    tall = -(-n // (tile.blocks * _BLOCK))
    kernel[(tall, tile.parts)](
        tiles(x, options["BLOCK_M"], CHUNK // 2),
        tiles(weight.words.view(-1, WORDS), _BOX, WORDS),
        tiles(weight.scale.view(-1, CHUNK // NVFP4_GROUP), _BOX, CHUNK // NVFP4_GROUP),
        weight.row,
        out,
        m,
        n,
        n // 2,
        weight.chunks,
        out.stride(-2),
        -(-weight.chunks // tile.parts),
        GATED=int(gated),
        LINED=int(lined),
        **options,
        **early(),
    )
