"""The blocks of GPTQ of several matrices by the CPU's loops, matrix by matrix."""

from __future__ import annotations

import numpy as np

from quant.fourbit import pairs, walk
from quant.fourbit.batched import Blocks


def walk_block(rows, upper, group_EK, first, missed):
    for e, w in enumerate(rows.w):
        d, zero = (x[e][:, group_EK[e].long()].contiguous().numpy() for x in (rows.d, rows.zero))
        walk.walk_block(
            w.numpy(), d, zero, upper[e].numpy(), np.float32(rows.end), first,
            rows.units[e].numpy(), missed[e].numpy(),
        )  # fmt: skip


def settle_block(rows, slope, hessian, added, first, moved):
    for e, units in enumerate(rows.units):
        arrays = (x.numpy() for x in (units, rows.d[e], rows.zero[e], slope[e], hessian[e]))
        rest = np.float32(added[e]), np.float32(rows.end), first, rows.group, rows.refit
        walk.settle_block(*arrays, *rest, moved[e].numpy())


def pair_block(rows, slope, hessian, added, first, moved):
    for e, units in enumerate(rows.units):
        arrays = (x.numpy() for x in (units, rows.d[e], rows.zero[e], slope[e], hessian[e]))
        rest = np.float32(added[e]), np.float32(rows.end), first, rows.group
        pairs.pair_block(*arrays, *rest, moved[e].numpy())


BLOCKS = Blocks(walk_block, settle_block, pair_block)
