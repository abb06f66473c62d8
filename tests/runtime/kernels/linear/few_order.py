"""Print, as JSON, in which order compiled kernels of a few rows wait for x and read it.

Run as a program, without TRITON_INTERPRET: kernels are compiled for sm_90, which takes no GPU.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels.linear import few, few_gated
from runtime.kernels.linear.few_tile import ROWS_OF_X

HOPPER = GPUTarget("cuda", 90, 32)
# what a line of Triton's GPU dialect does; copies run ahead of the loop that uses them
EVENTS = {
    "loop": r"scf\.for ",
    "wait": r"griddepcontrol\.wait",
    "x": rf"tt\.load .*tensor<\d+x\d+x{ROWS_OF_X}x!tt\.ptr<bf16>",
    "x ahead": rf"async_copy_global_to_local .*tensor<\d+x\d+x{ROWS_OF_X}x!tt\.ptr<bf16>",
}
TILE = {"BLOCK_M": ROWS_OF_X, "BLOCK_N": 32, "SLICES": 4, "STAGES": 3}
NO_SECOND = {"weight2": None, "scale2": None, "y2": None, "EDGE2": 0, "STEP2": 1, "EVEN2": 1}
SECOND = {"EDGE2": 0, "STEP2": 64, "EVEN2": 1}
KERNELS = {
    "bfloat16, two weights": (few._few_kernel, 0, 1, SECOND | {"ROWS2": 16}),
    "bfloat16, ragged": (few._few_kernel, 0, 0, NO_SECOND | {"ROWS2": 16}),
    "FP8 in blocks": (few._few_kernel, 128, 1, NO_SECOND | {"ROWS2": 16}),
    "gated, bfloat16": (few_gated._gated_kernel, 0, 1, {}),
    "gated, FP8 in rows, ragged": (few_gated._gated_kernel, 1, 0, {}),
}


def order(kernel, edge, even, more):
    """Return the events of a kernel in the order of its structured code."""
    fixed = TILE | {"EDGE": edge, "EVEN": even, "BLOCK_K": 128 if edge else 64} | more
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "y", "weight2", "scale2", "y2"), "*bf16")
    types |= dict.fromkeys(("weight", "gate_up"), "*fp8e4nv" if edge else "*bf16")
    types |= {"scale": "*fp32" if edge else "*bf16"}
    names = enumerate(kernel.arg_names)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in names if name not in fixed}
    kinds = {n: "constexpr" if n in fixed else types[n] for n in kernel.arg_names}
    source = ASTSource(kernel, kinds, constexprs=fixed, attrs=aligned)
    text = triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["ttgir"]
    return [
        event
        for line in text.splitlines()
        for event, pattern in EVENTS.items()
        if re.search(pattern, line)
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: order(*kernel) for name, kernel in KERNELS.items()}))
