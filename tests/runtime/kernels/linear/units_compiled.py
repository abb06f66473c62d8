"""Print, as JSON, how numbers lie in threads where units of four-bit weights are multiplied.

Run as a program, without TRITON_INTERPRET: kernels are compiled for sm_90, which takes no GPU.
"""

from __future__ import annotations

import json
import re
import sys

from runtime.kernels.linear import packed_stream, packed_strips
from runtime.kernels.moe.packed_row import packed_routed_row
from tests.runtime.kernels.early_kernels import packed, some
from tests.runtime.kernels.launches import caught, dialect, source

_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\S+<\{.*\}>)", re.MULTILINE)
_PRODUCT = re.compile(
    r"inline_asm .*(?:mma|shfl)\.sync.*\} %.* : tensor<(\d+)x\w+, (#\w+)>", re.MULTILINE
)


def cases():
    for group in (16, 128):
        row = some(1, 2048), some(2048), 1e-6
        packed_strips.packed_strips(*row, packed(12288, 2048, group=group), some(64, 2048))
        packed_strips.packed_strip(some(1, 4096), packed(2048, 4096, group=group), some(1, 2048))
        packed_stream.packed_row(some(1, 6144), packed(5120, 6144, group=group))
        packed_stream.packed_gated(some(1, 5120), packed(34816, 5120, group=group))
        stacks = packed(9, 1024, 2048, group=group), packed(9, 2048, 512, group=group)
        packed_routed_row(some(1, 2048), *stacks, some(1, 9), 8, some(1, 2048))


def products(text):
    """Return (numbers, layout) of each product and each exchange between threads."""
    layouts = dict(_LAYOUT.findall(text))
    return [(int(size), layouts[name]) for size, name in _PRODUCT.findall(text)]


def found():
    """Return of each launch its kernel, its threads, and its products."""
    with caught() as launches:
        cases()
    for kernel, arguments, options in launches:
        options.pop("launch_pdl")
        text = dialect(source(kernel, arguments), options)
        yield kernel.fn.__name__, 32 * options["num_warps"], products(text)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(found())))
