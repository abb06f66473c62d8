"""Print, as JSON, what is compiled of dense products whose warps have roles.

Of FP8 ones for each width of a tile, of a gated one, "gated".

Run as a program, without TRITON_INTERPRET, as tests.runtime.kernels.roles_compiled is.
"""

from __future__ import annotations

import json
import sys

import torch

from runtime.kernels.encode.rows import Codes
from runtime.kernels.linear import roles, roles_gated
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.waves import MULTIPROCESSORS, WIDTHS
from tests.runtime.kernels.launches import caught
from tests.runtime.kernels.roles_compiled import facts, some

M, N, K = 512, 5120, 17408


def product(width):
    """Return the launch of a product in tiles of so many columns, caught on the way."""
    codes = some(N, K, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(codes, some(N // 128, K // 128, dtype=torch.float32))
    with caught() as found:
        roles.roles_linear(Codes.room(M, K, torch.device("meta")), weight, torch.bfloat16, width)
    return found[0]


def gated():
    """Return the launch of gate and up of 0.8B, caught on the way."""
    with caught() as found:
        roles_gated.roles_gated(some(M, 1024), some(7168, 1024))
    return found[0]


if __name__ == "__main__":
    roles.multiprocessors = roles_gated.multiprocessors = lambda gpu: MULTIPROCESSORS
    made = {width: facts(*product(width)) for width in WIDTHS} | {"gated": facts(*gated())}
    sys.stdout.write(json.dumps(made))
