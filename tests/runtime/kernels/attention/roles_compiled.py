"""Print, as JSON, what is compiled of attention whose warps have roles.

Run as a program, without TRITON_INTERPRET, as tests.runtime.kernels.roles_compiled is.
"""

from __future__ import annotations

import json
import sys

import torch

from runtime.kernels.attention import roles
from runtime.kernels.waves import MULTIPROCESSORS
from tests.runtime.kernels.launches import caught
from tests.runtime.kernels.roles_compiled import facts, some

TOKENS, PLACES = 300, 400


def attention():
    """Return the launch for two sequences, caught on the way."""
    both, pool = some(TOKENS, 16, 512), some(3, PLACES, 2, 256)
    lists = (some(n, dtype=torch.int64) for n in (2, 3, 2))
    with caught() as found:
        roles.roles_prefill(both[..., :256], both[..., 256:], pool, pool, *lists)
    return found[0]


if __name__ == "__main__":
    roles.multiprocessors = lambda gpu: MULTIPROCESSORS
    sys.stdout.write(json.dumps(facts(*attention())))
