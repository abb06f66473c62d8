"""Faults in GGUF files whose codes and points make up for each other's errors.

Without a receipt one block tells nothing, for GPTQ moves any code: of these only the receipt tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from quant.ggml import kinds
from tests.planted.block_faults import Change, bits, half, of_type
from tests.planted.code_faults import UP, Blocks
from tests.planted.edit import Tensors
from tests.planted.fault import FORGED, Fault, in_outputs

GROUP = "codes by gptq"
KINDS = {
    "Q2_K": "q2_k-gptq",
    "Q4_K": "q4_k_m-gptq",
    "IQ2_XXS": "iq2_xxs-gptq",
    "IQ3_XXS": "iq3_xxs-gptq",
}
# A byte of codes, or of points.
CODES = {"Q2_K": 20, "Q4_K": 20, "IQ2_XXS": 3, "IQ3_XXS": 5}


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for kind, output in KINDS.items():
        where, plant = in_outputs(output), partial(_blocks, kind=kind)
        yield from of_type(GROUP, kind, plant, where, _of_all(kind))
        yield from of_type(GROUP, kind, plant, where, _of_one(kind), receipts=(FORGED,))


def _blocks(tensors: Tensors, kind: str, change: Change) -> str:
    entry = tensors.at(UP)
    assert entry.info.dtype == kind, f"{entry.info.name} is {entry.info.dtype}"
    shape = entry.info.shape[0], -1, kinds.block(kind)[1]
    change(entry.data.reshape(shape))
    return entry.info.name


def _of_all(kind: str) -> dict[str, Change]:
    """Return changes of weights, [N, blocks, bytes], that no encoder makes."""
    return {
        "scales-halved": _scales(kind, lambda d: d / 2),
        "scales-doubled": _scales(kind, lambda d: d * 2),
        "a-scale-nan": partial(_flat, change=half(kinds.SUPER_BLOCKS[kind][0], lambda _: np.nan)),
        "zeroed": _assign(0),
        "a-row-zeroed": lambda blocks: _assign(0)(blocks[3:4]),
        "rows-off-by-one": lambda blocks: _assign(np.roll(blocks, 1, 0))(blocks),
        "two-rows-swapped": lambda blocks: _assign(blocks[[8, 7]].copy())(blocks[7:9]),
    }


def _of_one(kind: str) -> dict[str, Change]:
    """Return changes of a block that GPTQ might have made."""
    changes = {
        "a-code-turned": bits(CODES[kind], 0x04),
        "a-scale-by-an-ulp": bits(kinds.SUPER_BLOCKS[kind][0], 0x01),
        "a-scale-halved": half(kinds.SUPER_BLOCKS[kind][0], lambda d: d / 2),
    }
    return {name: partial(_flat, change=change) for name, change in changes.items()}


def _flat(blocks: Blocks, change: Change) -> None:
    change(blocks.reshape(-1, blocks.shape[-1]))


def _assign(values: Blocks | int) -> Change:
    def apply(blocks: Blocks) -> None:
        blocks[:] = values

    return apply


def _scales(kind: str, how: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Return a change of the float16 scales of all super-blocks."""

    def apply(blocks: Blocks) -> None:
        for at in kinds.SUPER_BLOCKS[kind]:
            scales = blocks[..., at : at + 2].copy().view(np.float16)
            blocks[..., at : at + 2] = how(scales).astype(np.float16).view(np.uint8)

    return apply
