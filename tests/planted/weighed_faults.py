"""Faults in blocks that an importance matrix weighed, which without a receipt nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from quant.ggml import kinds
from quant.ggml.i_points import PLACES
from tests.planted.block_faults import Change, half
from tests.planted.code_faults import UP, Blocks
from tests.planted.edit import Tensors
from tests.planted.fault import Fault, in_outputs
from tests.planted.tensor_fault import tensor_fault

KINDS = {"IQ2_XXS": "iq2_xxs", "IQ3_XXS": "iq3_xxs", "Q2_K": "q2_k"}


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for kind, output in KINDS.items():
        for name, change in _changes(kind).items():
            plant = partial(_blocks, kind=kind, change=change)
            yield tensor_fault("blocks", f"{kind.lower()}-{name}", plant, in_outputs(output))


def _blocks(tensors: Tensors, kind: str, change: Change) -> str:
    entry = tensors.at(UP)
    assert entry.info.dtype == kind, f"{entry.info.name} is {entry.info.dtype}"
    change(entry.data.reshape(-1, kinds.block(kind)[1]))
    return entry.info.name


def _changes(kind: str) -> dict[str, Change]:
    (at, *_) = kinds.SUPER_BLOCKS[kind]
    found: dict[str, Change] = {
        "scale-doubled": half(at, lambda d: 2 * d),
        "scale-halved": half(at, lambda d: d / 2),
        "scale-zero": half(at, lambda _: 0.0),
        "scale-nan": half(at, lambda _: float("nan")),
        "a-block-zeroed": _zero,
        "two-blocks-swapped": _swap,
    }
    if kind in PLACES:
        found["points-of-the-neighbour"] = partial(_points_of_the_neighbour, kind)
    return found


def _zero(blocks: Blocks) -> None:
    blocks[7] = 0


def _swap(blocks: Blocks) -> None:
    blocks[[7, 8]] = blocks[[8, 7]]


def _points_of_the_neighbour(kind: str, blocks: Blocks) -> None:
    blocks[7, PLACES[kind]] = blocks[8, PLACES[kind]]
