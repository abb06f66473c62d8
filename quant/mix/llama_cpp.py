"""What llama-quantize and llama.cpp's converter choose, type by type, for this family.

    a class of tensors gets another type where a condition on its place i of n holds

The classes and conditions are in `llama_cpp_table`; all else (ssm_*, attn_gate, nextn.eh_proj)
takes the mix's default, also ssm_alpha and ssm_beta, which the delta rule compounds. Source:
llama.cpp's src/llama-quant.cpp at b11434; the tests hold its own output.

Traps: attn_qkv of the delta rule counts as attn_v, in one row with it. n is the number of blocks
with the MTP head's. ffn_* count in a dense model; with experts their block is their place. Eight
experts are taken for Mixtral. A tensor that a rule decides is counted in n, but is not a place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.ggml import kinds
from quant.mix.llama_cpp_table import (
    CLASSES,
    DEFAULTS,
    DOWN,
    GATE,
    HEADS,
    PLAIN,
    UP,
    Place,
    V,
    rules_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quant.mix.llama_cpp_table import Rules
    from quant.mix.tensors import Facts, MixTensor


def pick(
    mix: str, tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> dict[str, tuple[str, str]]:
    """Return type and reason by the name of each free tensor.

    tensors  all of the file
    free     those that no rule decides and that are not always F32
    """
    if mix in PLAIN:
        return {tensor.name: (mix.upper(), f"all of {mix}") for tensor in free}
    table = rules_of(mix, facts.num_experts)
    places, head = _places(tensors, facts, free), "token_embd" if facts.tied else "output"
    return {
        tensor.name: (_head(mix, tensor), f"llama.cpp: head of {mix}")
        if tensor.kind == head
        else _choose(mix, tensor, table, places.get(tensor.name))
        for tensor in free
    }


def _choose(mix: str, tensor: MixTensor, table: Rules, place: Place | None) -> tuple[str, str]:
    """Return type and reason of a tensor that is not the head."""
    if len(tensor.shape) == 2 and tensor.shape[0] == 1:
        return "F32", "llama.cpp: one row is a vector"
    if mix == "mxfp4_moe":
        stacked = len(tensor.shape) > 2 and tensor.shape[0] > 1
        return ("MXFP4" if stacked else "Q8_0"), "llama.cpp: mxfp4_moe"
    if place is not None:
        kind = CLASSES[tensor.kind]
        for type_, holds in table.get(kind, ()):
            if holds(place):
                return type_, f"llama.cpp: {kind} {place.i} of {place.n} in {mix}"
    return DEFAULTS[mix], f"llama.cpp: default of {mix}"


def _head(mix: str, tensor: MixTensor) -> str:
    """Return the type of the output matrix."""
    if tensor.shape[-1] % kinds.block(DEFAULTS[mix])[0]:
        return "Q8_0"
    return HEADS.get(mix, "Q6_K")


def _places(
    tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> dict[str, Place]:
    """Return the places of the classes whose types depend on them, counted by block and name."""
    total_v = sum(CLASSES.get(tensor.kind) == V for tensor in tensors)
    blocks = max(facts.num_layers, *(tensor.block + 1 for tensor in tensors))
    places, counts = {}, dict.fromkeys(CLASSES.values(), 0)
    for tensor in sorted(free, key=lambda tensor: (tensor.block, tensor.name)):
        kind = CLASSES.get(tensor.kind)
        if kind is None:
            continue
        by_block = kind in (DOWN, GATE, UP) and facts.num_experts > 1
        i = tensor.block if by_block else counts[kind]
        n, counted = total_v if kind == V else blocks, counts[kind]
        places[tensor.name] = Place(i, n, counted, facts.gqa, facts.num_experts, facts.imatrix)
        counts[kind] += 1
    return places
