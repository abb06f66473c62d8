"""The mix `nvfp4`: it is asked for its kernels, so every linear has it that may.

A weight has a scale beside it, `NAME.scale`, which llama.cpp knows of the linears of the decoder.
It looks rows of the embedding up without one, and refuses a file that has one in the MTP block.

Source: the loader of llama.cpp at b11549, run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant.mix.tensors import Facts, MixTensor

MIX, TYPE = "nvfp4", "NVFP4"
ELSE = "Q8_0"
EMBEDDING, HEAD = "token_embd", "output"
FIXED = {"ssm_alpha": "F32", "ssm_beta": "F32"}


def without_scale(tensor: MixTensor, facts: Facts) -> str | None:
    """Say what a tensor is that llama.cpp knows no scale of, None if it knows one."""
    if tensor.block >= facts.num_layers:
        return "the MTP block"
    return "the embedding" if tensor.kind == EMBEDDING else None


def pick(facts: Facts, free: Sequence[MixTensor]) -> dict[str, tuple[str, str]]:
    """Return type and reason by the name of each free tensor."""
    return {tensor.name: _choose(tensor, facts) for tensor in free}


def _choose(tensor: MixTensor, facts: Facts) -> tuple[str, str]:
    if tensor.kind in FIXED:
        return FIXED[tensor.kind], "ours: the delta rule compounds its error"
    if tensor.kind == HEAD:
        return ELSE, f"ours: head of {MIX}"
    place = without_scale(tensor, facts)
    if place:
        return ELSE, f"ours: llama.cpp reads no NVFP4 scale of {place}"
    return TYPE, f"ours: {MIX}"
