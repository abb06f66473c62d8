"""ggml's types whose blocks are points of a grid, IQ2 and IQ3, by GPTQ: see `point_walk`.

The type's own encoder takes scale and levels of every super-block, with the diagonal of the Hessian
for its importance. Then points and signs make up for each other's errors, and levels near those.

Shape letters: N rows, K columns, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.fourbit.ggml_codes import GgmlCodes
from quant.ggml import codec

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from quant.fourbit.judge import Decoded
    from quant.measure import Error


# As coarse as four bits or coarser, to `judge_whole`.
BITS = 4


@dataclass(frozen=True, slots=True)
class GgmlPoints(GgmlCodes):
    """One of the types in `point_fields.FIELDS`."""

    column_multiple: int = 8

    def feed_back(self, w_NK: Tensor, factor: Factor) -> Tensor:
        """Return blocks whose points GPTQ chooses, uint8 [N, B]."""
        return feed_back(self.type, w_NK, factor)

    def decoded(self, w_NK: Tensor, blocks_NB: Tensor) -> Decoded:
        """Return what blocks hold of a weight, for `judge_rows`."""
        return decoded(self.type, w_NK, blocks_NB)

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its blocks, and gains of the whole."""
        if not self.fed_back:
            return super(GgmlPoints, self).judge(error)
        from quant.fourbit.judge import judge_whole
        from quant.fourbit.point_fields import FIELDS

        return judge_whole(error, FIELDS[self.type].block, BITS, free=False)


def decoded(name: str, w_NK: Tensor, blocks_NB: Tensor) -> Decoded:
    """Return what blocks hold of a weight, for `judge_rows`: levels as if each were free."""
    import numpy as np
    import torch

    from quant.fourbit.columns import is_usual, spread
    from quant.fourbit.judge import Decoded
    from quant.fourbit.point_fields import FIELDS
    from quant.fourbit.points import take_points
    from quant.ggml.i_grids import levels

    columns, points = w_NK.shape[1], take_points(name, blocks_NB)
    steps = torch.from_numpy(points.steps(FIELDS[name].block))
    step = spread(steps, None, columns)
    one_side = torch.from_numpy(np.unique(levels(name)))
    values = torch.cat([-one_side.flip(0), one_side])
    stored = codec.decode(name, blocks_NB, columns)
    place = torch.bucketize(stored / step.where(step != 0, 1.0), (values[1:] + values[:-1]) / 2)
    apart = values.diff()
    wider = torch.cat([apart[:1], torch.maximum(apart[1:], apart[:-1]), apart[-1:]])
    outward = (place == len(values) - 1).int() - (place == 0).int()
    largest = values[-1] * step
    return Decoded(
        stored, wider[place] * step.abs(), outward * step.sign(),
        is_usual(w_NK, 2 * values[-1] * steps.abs(), None), FIELDS[name].block,
        w_NK.abs() > largest.abs(),
    )  # fmt: skip


def feed_back(name: str, w_NK: Tensor, factor: Factor, passes: int | None = None) -> Tensor:
    """Return blocks whose points GPTQ chooses, uint8 [N, B].

    passes  how often they are settled afterwards; None: as usual

    QuantError as for `codec.encode`.
    """
    import torch

    from quant.fourbit.calibrate import in_turn, weights_of
    from quant.fourbit.point_fields import EIGHT
    from quant.fourbit.point_walk import REACH, Walk, choose_points
    from quant.fourbit.points import put_points, take_points

    factor = factor.on_cpu().joined(EIGHT)
    blocks = codec.encode(name, w_NK, importance=weights_of(factor.diagonal))
    walker = Walk.of(name, factor)

    def one(part: slice, w: Tensor) -> Tensor:
        points = take_points(name, blocks[part])
        choose_points(walker, w.numpy(), points, len(REACH) if passes is None else passes)
        blocks[part] = put_points(name, blocks[part], points)
        return w - torch.from_numpy(walker.values(points))

    in_turn(w_NK, factor, one)
    return blocks
