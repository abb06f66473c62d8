"""Scales of activations, which static quantisers store beside the weights.

    x.input_scale                      of a linear's inputs: ModelOpt, AutoFP8, compressed-tensors
    x.input_global_scale               the same of NVFP4, by compressed-tensors
    self_attn.k_scale, k_proj.k_scale  of the attention cache

No weight depends on them, and none of them fits an artifact whose weights were quantised anew: they
are not read, and that is said. Those of NVFP4 are parts of its weights, which are stored with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from formats.tensor import TensorInfo

INPUTS, CACHE = "inputs", "the attention cache"
# last segment of a name: what it scales
ACTIVATION_SCALES = {
    "input_scale": INPUTS, "input_global_scale": INPUTS, "input_scale_ub": INPUTS,
    "input_zero_point": INPUTS, "act_scale": INPUTS, "output_scale": CACHE, "kv_scale": CACHE,
    "k_scale": CACHE, "v_scale": CACHE, "k_zero_point": CACHE, "v_zero_point": CACHE,
    "q_scale": CACHE, "prob_scale": CACHE,
}  # fmt: skip


def scaled_by(name: str) -> str | None:
    """Return what a tensor of this name scales; None if it is none of these scales."""
    return ACTIVATION_SCALES.get(name.rpartition(".")[2])


def take_activation_scales(held: dict[str, TensorInfo], parts: Collection[str]) -> tuple[str, ...]:
    """Take these scales out of the tensors by table names; return their stored names.

    parts  stored names of what is part of a quantised weight, and stays
    """
    scales = [hub for hub, i in held.items() if scaled_by(i.name) and i.name not in parts]
    return tuple(held.pop(hub).name for hub in scales)


def activation_notes(stored: Sequence[str]) -> Iterator[str]:
    """Yield what is said of scales that are not read."""
    for what, count in Counter(map(scaled_by, stored)).items():
        first = next(name for name in stored if scaled_by(name) == what)
        yield f"{count} scales of {what} are left out ({first} ...): no weight depends on them"
