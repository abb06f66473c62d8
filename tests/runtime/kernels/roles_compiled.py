"""Print, as JSON, what is compiled of the kernels whose warps have roles, for some sizes.

Run as a program, without TRITON_INTERPRET: kernels are compiled for sm_90, which takes no GPU.
"""

from __future__ import annotations

import json
import re
import sys

import torch
import triton

from runtime.kernels.encode.rows import Codes
from runtime.kernels.linear.weight import Fp8Weight, Stored
from runtime.kernels.moe import roles
from tests.runtime.kernels.launches import HOPPER, caught, source

SIZES = ((2048, 512), (3072, 1024), (256, 128))  # hidden and inner: 35B-A3B, 122B-A10B, odd ones
TOKENS, EXPERTS, TOP = 300, 5, 3
_COPY = re.compile(r"async_tma_copy_global_to_local .*-> !ttg\.memdesc<(\d+)x(\d+)x[a-z]+(\d+)")


def some(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def stack(n, k):
    codes = some(EXPERTS, n, k, dtype=torch.float8_e4m3fn)
    scale = some(EXPERTS, n // 128, k // 128, dtype=torch.float32)
    return Stored.of(Fp8Weight(codes, scale))


def experts(hidden, inner):
    """Return the launches of both products of experts, caught on the way."""
    chosen = some(TOKENS, TOP), some(TOKENS, TOP, dtype=torch.int64)
    with caught() as found:
        roles.roles_pairs(
            some(TOKENS, hidden),
            stack(2 * inner, hidden),
            stack(hidden, inner),
            *chosen,
            Codes.room(TOKENS, hidden, torch.device("meta")),
        )
    return [launch for launch in found if launch[0].is_gluon()]


def facts(kernel, arguments, options):
    """Return what a test asks of one kernel."""
    options.pop("launch_pdl", None)
    made = triton.compile(source(kernel, arguments), target=HOPPER, options=options)
    text = made.asm["ttgir"]
    dots = re.findall(r"ttng\.warp_group_dot .*?isAsync = (\w+)", text)
    return {
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "dots": len(dots),
        "started": dots.count("true"),
        "left": [int(n) for n in re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", text)],
        "arrivals": sorted({int(n) for n in re.findall(r"init_barrier %\S+, (\d+)", text)}),
        "unshared": unshared(text),
        "copied": copied(text),
        "expected": [int(n) for n in re.findall(r"barrier_expect %\S+, (\d+)", text)],
    }


def unshared(text):
    """Return the barriers that the groups of warps do not share: nobody waits for them."""
    made = re.findall(r"(%\w+) = ttg\.local_alloc : .*xi64", text)
    shared = re.search(r"ttg\.warp_specialize\(([^)]*)\)", text)[1].split(", ")
    return [name for name in made if name not in shared]


def copied(text):
    """Return how many bytes of bulk copies follow each expectation, before the next wait."""
    found, counting = [], False
    for line in text.splitlines():
        if "ttng.barrier_expect" in line:
            found.append(0)
            counting = True
        elif "ttng.wait_barrier" in line:
            counting = False
        elif counting and (copy := _COPY.search(line)):
            found[-1] += int(copy[1]) * int(copy[2]) * int(copy[3]) // 8
    return found


if __name__ == "__main__":
    roles.multiprocessors = lambda gpu: 132
    found = {f"{hidden} {inner}": experts(hidden, inner) for hidden, inner in SIZES}
    made = {name: [facts(*launch) for launch in each] for name, each in found.items()}
    sys.stdout.write(json.dumps(made))
