"""Print, as JSON, what is compiled of products of four bits whose warps have roles, for some rows.

Run as a program, without TRITON_INTERPRET, as tests.runtime.kernels.roles_compiled is.
"""

from __future__ import annotations

import json
import re
import sys

import triton

from runtime.kernels.encode.lined import Lined
from runtime.kernels.linear import packed_roles
from tests.runtime.kernels.early_kernels import packed, some
from tests.runtime.kernels.launches import HOPPER, caught, source

ROWS = (40, 64)
BYTES = {"bf16": 2, "i32": 4, "i8": 1}
_COPY = re.compile(r"async_tma_copy_global_to_local .*-> !ttg\.memdesc<(\d+)x(\d+)x(\w+),")


def launches(rows):
    """Return a launch that gates, and one in parts, caught on the way."""
    gate_up, down = packed(34816, 5120, group=16), packed(5120, 17408, group=16)
    with caught() as found:
        packed_roles.lined_gated(some(rows, 5120), gate_up, Lined(some(rows, 5120)))
        packed_roles.lined_parts(Lined(some(rows, 17408)), down)
    return found


def facts(kernel, arguments, options):
    """Return what a test asks of one kernel."""
    made = triton.compile(source(kernel, arguments), target=HOPPER, options=options)
    text = made.asm["ttgir"]
    dots = re.findall(r"ttng\.warp_group_dot .*?isAsync = (\w+)", text)
    return {
        "blocks": arguments["MORE"] + arguments["FEWER"],
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "dots": len(dots),
        "started": dots.count("true"),
        "taken": [text.count(f"bar.sync {barrier}, 256") for barrier in (8, 9)],
        "passed": [text.count(f"bar.arrive {barrier}, 256") for barrier in (8, 9)],
        "arrivals": sorted({int(n) for n in re.findall(r"init_barrier %\S+, (\d+)", text)}),
        "expected": [int(n) for n in re.findall(r"barrier_expect %\S+, (\d+)", text)],
        "copied": copied(text),
    }


def copied(text):
    """Return how many bytes of bulk copies follow each expectation."""
    found = []
    for line in text.splitlines():
        if "ttng.barrier_expect" in line:
            found.append(0)
        elif copy := _COPY.search(line):
            found[-1] += int(copy[1]) * int(copy[2]) * BYTES[copy[3]]
    return found


if __name__ == "__main__":
    made = {str(rows): [facts(*one) for one in launches(rows)] for rows in ROWS}
    sys.stdout.write(json.dumps(made))
