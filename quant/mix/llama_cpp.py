"""What llama-quantize and llama.cpp's converter choose, type by type, for this family.

    a class of tensors gets another type where a condition on its place i of n holds

In these architectures there are four such classes; all else (ssm_*, attn_q, attn_gate, ffn_gate,
ffn_up, nextn.eh_proj) takes the mix's default, also ssm_alpha and ssm_beta, which the delta rule
compounds. Source: llama.cpp's src/llama-quant.cpp at b11434; the tests hold its own output.

Traps: attn_qkv of the delta rule counts as attn_v, in one row with it. n is the number of blocks
with the MTP head's. ffn_down counts in a dense model; with experts its block is its place. Eight
experts are taken for Mixtral. A tensor that a rule decides is counted in n, but is not a place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.ggml import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quant.mix.tensors import Facts, MixTensor

PLAIN = ("f32", "f16", "bf16")
MIXTRAL = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: the i-th of n of its class, in a model of these facts."""

    i: int
    n: int
    gqa: int
    imatrix: bool


def _always(_: Place) -> bool:
    return True


def _more_bits(at: Place) -> bool:
    """Hold in the first and last eighth, and in every third between."""
    return at.i < at.n // 8 or at.i >= 7 * at.n // 8 or (at.i - at.n // 8) % 3 == 2


def _first(count: int) -> Callable[[Place], bool]:
    return lambda at: at.i < count


def _first_share(parts: int) -> Callable[[Place], bool]:
    return lambda at: at.i < at.n // parts


def _wide_gqa(at: Place) -> bool:
    return at.gqa >= 4


def _first_eighth_if(*, imatrix: bool) -> Callable[[Place], bool]:
    return lambda at: at.i < at.n // 8 and at.imatrix is imatrix


Condition = tuple[str, "Callable[[Place], bool]"]
V, K, OUT, DOWN = "attn_v", "attn_k", "attn_output", "ffn_down"
CLASSES = {
    "attn_v": V, "attn_qkv": V, "attn_k": K, "attn_output": OUT,
    "ffn_down": DOWN, "ffn_down_exps": DOWN, "ffn_down_shexp": DOWN,
}  # fmt: skip
DEFAULTS = {
    "q2_k": "Q2_K", "q3_k_s": "Q3_K", "q3_k_m": "Q3_K", "q3_k_l": "Q3_K", "q4_k_s": "Q4_K",
    "q4_k_m": "Q4_K", "q5_k_s": "Q5_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K", "q4_0": "Q4_0",
    "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q8_0": "Q8_0", "iq4_nl": "IQ4_NL",
    "iq4_xs": "IQ4_XS", "mxfp4_moe": "MXFP4", "nvfp4": "NVFP4",
}  # fmt: skip
_IQ4: dict[str, tuple[Condition, ...]] = {
    V: (("Q5_K", _wide_gqa),),
    DOWN: (("Q5_K", _first_eighth_if(imatrix=False)),),
}
_M: dict[str, tuple[Condition, ...]] = {V: (("Q6_K", _more_bits),), DOWN: (("Q6_K", _more_bits),)}
# Of each mix and class: the first type whose condition holds.
TABLE: dict[str, dict[str, tuple[Condition, ...]]] = {
    "q2_k": {
        V: (("Q4_K", _wide_gqa), ("Q3_K", _always)),
        DOWN: (("Q3_K", _always),), OUT: (("Q3_K", _always),),
    },
    "q3_k_m": {
        V: (("Q5_K", _first(2)), ("Q4_K", _always)),
        DOWN: (("Q5_K", _first_share(16)), ("Q4_K", _always)), OUT: (("Q4_K", _always),),
    },
    "q3_k_l": dict.fromkeys((V, DOWN, OUT), (("Q5_K", _always),)),
    "q4_k_s": {V: (("Q5_K", _first(4)),), DOWN: (("Q5_K", _first_share(8)),)},
    "q4_k_m": _M,
    "q5_k_m": _M,
    "q4_0": {DOWN: (("Q4_1", _first_eighth_if(imatrix=True)),)},
    "q5_0": {DOWN: (("Q5_1", _first_eighth_if(imatrix=True)),)},
    "iq4_nl": _IQ4,
    "iq4_xs": _IQ4,
}  # fmt: skip
MIXTRAL_OUT = frozenset({"q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs"})


def pick(
    mix: str, tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> dict[str, tuple[str, str]]:
    """Return type and reason by the name of each free tensor.

    tensors  all of the file
    free     those that no rule decides and that are not always F32
    """
    if mix in PLAIN:
        return {tensor.name: (mix.upper(), f"all of {mix}") for tensor in free}
    table = _mixtral(mix) if facts.num_experts == MIXTRAL else TABLE.get(mix, {})
    places, head = _places(tensors, facts, free), "token_embd" if facts.tied else "output"
    return {
        tensor.name: (_head(mix, tensor), f"llama.cpp: head of {mix}")
        if tensor.kind == head
        else _choose(mix, tensor, table, places.get(tensor.name))
        for tensor in free
    }


def _choose(
    mix: str, tensor: MixTensor, table: Mapping[str, Sequence[Condition]], place: Place | None
) -> tuple[str, str]:
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
    default = DEFAULTS[mix]
    if mix in {"mxfp4_moe", "nvfp4", "q8_0"} or tensor.shape[-1] % codec.block(default)[0]:
        return "Q8_0"
    return "Q6_K"


def _mixtral(mix: str) -> dict[str, tuple[Condition, ...]]:
    """Return the table for exactly eight experts."""
    table = dict(TABLE.get(mix, {}))
    table |= dict.fromkeys((V, K), (("Q8_0", _always),))
    table[OUT] = (("Q5_K", _always),) if mix in MIXTRAL_OUT else ()
    return table


def _places(
    tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> dict[str, Place]:
    """Return the places of the classes whose types depend on them, counted by block and name."""
    total_v = sum(CLASSES.get(tensor.kind) == V for tensor in tensors)
    blocks = max(facts.num_layers, *(tensor.block + 1 for tensor in tensors))
    places, counts = {}, dict.fromkeys((V, K, OUT, DOWN), 0)
    for tensor in sorted(free, key=lambda tensor: (tensor.block, tensor.name)):
        kind = CLASSES.get(tensor.kind)
        if kind is None:
            continue
        by_block = kind == DOWN and facts.num_experts > 1
        i = tensor.block if by_block else counts[kind]
        n = total_v if kind == V else blocks
        places[tensor.name] = Place(i, n, facts.gqa, facts.imatrix)
        counts[kind] += 1
    return places
