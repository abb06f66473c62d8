"""How long a product keeps the busiest multiprocessor busy, by the tiles that it is cut into.

    waves = ceil(tiles / multiprocessors)      steps = waves * columns of a tile

Tiles of 128 rows of x are computed at once, one on each multiprocessor, and all wait for the last:
160 tiles on 132 multiprocessors take as long as 264.

Shape letters: M rows of x, N outputs.
"""

from __future__ import annotations

MULTIPROCESSORS = 132  # of an H100, an H200 and a GH200
HEIGHT = 128
WIDTHS = (160, 192)  # of a tile of linear.roles
USUAL = 128  # of a tile of cuBLAS
GATED = 256  # of a tile of linear.roles_gated: half of them are the gate's


def steps(rows: int, n: int, width: int) -> int:
    """Return how many outputs of 128 rows the busiest multiprocessor computes."""
    tiles = -(-rows // HEIGHT) * -(-n // width)
    return -(-tiles // MULTIPROCESSORS) * width


def best_width(rows: int, n: int) -> int:
    """Return the width of tiles that keeps the busiest multiprocessor least busy.

    For each of its outputs a narrow tile reads more: H200, 512 x 34816 x 5120, 8 % longer a step.
    """
    return min(WIDTHS, key=lambda width: steps(rows, n, width) * (1.08 if width == 160 else 1))


def fits(rows: int, n: int) -> bool:
    """Return whether tiles of these widths take at most 0.7 of the steps of the usual ones.

    At 0.83 nothing is gained: H200, 27B FP8, 1024 rows, 58.0 ms for 57.8; at 0.63, 400 rows, 28.7
    for 31.2.
    """
    return steps(rows, n, best_width(rows, n)) <= 0.7 * steps(rows, n, USUAL)


def fills(rows: int, n: int) -> bool:
    """Return whether gated tiles leave at most a fifth of the multiprocessors' time unused.

    H200, us, beside cuBLAS and a kernel for the gate: 26.2 for 18.3 where 0.53 are used (515 x 7168
    x 1024), 98 for 81 at 0.73 (256 x 24576 x 4096), 16.9 for 17.0, 29.6 for 34.0 and 51.6 for 53.0
    at 0.85 (512, 1024, 2048 x 7168 x 1024), 172 for 213 at 0.97 (8192).
    """
    tiles = -(-rows // HEIGHT) * -(-n // GATED)
    return 5 * tiles >= 4 * MULTIPROCESSORS * -(-tiles // MULTIPROCESSORS)
