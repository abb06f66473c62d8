"""Faults that headers show: what goes together is not all there, or there is one too many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.planted.edit import Tensors
from tests.planted.fault import Fault, in_bases
from tests.planted.header_faults import FP8, UP, fault, remove

EXPERTS = in_bases("moe-fp8-block", "moe-fp8-channel", "moe-bf16-split")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    one = partial(remove, hub="layers.1.mlp.experts.2.up_proj.weight")
    yield fault("missing-expert", one, EXPERTS)
    yield fault("missing-all-of-an-expert", _without_expert, EXPERTS)
    yield fault("extra-expert", _fifth_expert, EXPERTS)
    yield fault("missing-scale", _without_scale, FP8)
    yield fault("extra-second-scale", _second_scale, FP8)


def _without_scale(tensors: Tensors) -> str:
    scale = tensors.scale(UP)
    del tensors.home(scale.info.name).entries[scale.info.name]
    return tensors.stored(UP)


def _second_scale(tensors: Tensors) -> str:
    """Store a scale under the name of either format."""
    scale = tensors.scale(UP)
    name = scale.info.name
    other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
    tensors.home(name).entries[other] = scale.renamed(other)
    return other


def _of_the_last_expert(tensors: Tensors) -> list[str]:
    return [name for name in tensors.names() if ".experts.3." in name]


def _fifth_expert(tensors: Tensors) -> str:
    """Store the last expert of every layer a second time, as one more."""
    for name in _of_the_last_expert(tensors):
        more = name.replace(".experts.3.", ".experts.4.")
        entries = tensors.home(name).entries
        entries[more] = entries[name].renamed(more)
    return "mlp.experts.4."


def _without_expert(tensors: Tensors) -> str:
    for name in _of_the_last_expert(tensors):
        del tensors.home(name).entries[name]
    return "mlp.experts.3."
