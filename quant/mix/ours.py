"""Our mixes: at most 2 % more bytes than llama.cpp's of the same name, spent where they save most.

    loss = sum over tensors of   sensitivity(kind, depth) * error(type)      [KL, 1e-3 nats a token]

Every tensor starts at the mix's own type, and nothing goes below it. Then, as long as the file
stays within its budget, the step up that saves most loss for a byte is taken. This is why the types
depend on the model: a mixture of experts has nearly all its bytes in experts, so everything beside
them is raised to Q8_0, while a dense model pays for ssm_out, attn_v and the embeddings. llama.cpp
instead gives Q6_K to half of attn_qkv and ffn_down, whose other half then dominates the loss.

What the delta rule compounds (ssm_alpha, ssm_beta) is F32: llama.cpp rounds the other factor to the
weight's type, so BF16 would not do. The MTP head's entry is Q8_0, and the rest of its block is
treated as one more layer.

Source: KL on two small trained models of the family, one kind of tensor in Q4_K at a time, and one
layer at a time; rounded, and of a whole mix then measured against llama.cpp's. Errors of IQ3 and
IQ2 are those of all linears of the dense one, with an importance matrix.
Traps: what was set by judgement is attention, doubled because those texts are short; the embedding
beside experts, where one rerouted token swamps the measure; ffn_down beside experts, whose rows
were too short for Q4_K; the error of Q2_K and Q4_1. That a deeper model spreads the same loss of a
kind over more layers is an assumption: no released model was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quant.ggml import codec
from quant.mix import llama_cpp
from quant.mix.llama_cpp_table import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quant.mix.tensors import Facts, MixTensor

BUDGET = 1.02
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
I_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", *K_TYPES[3:])
# Of each mix the types a tensor may have, its own first.
LADDERS = {
    "q2_k": K_TYPES, "q2_k_s": K_TYPES,
    "q3_k_s": K_TYPES[1:], "q3_k_m": K_TYPES[1:], "q3_k_l": K_TYPES[1:],
    "q4_k_s": K_TYPES[2:], "q4_k_m": K_TYPES[2:], "q5_k_s": K_TYPES[3:], "q5_k_m": K_TYPES[3:],
    "q6_k": K_TYPES[4:], "q8_0": ("Q8_0",), "mxfp4_moe": ("Q8_0",),
    "q4_0": ("Q4_0", *K_TYPES[3:]), "q4_1": ("Q4_1", *K_TYPES[3:]),
    "q5_0": ("Q5_0", *K_TYPES[4:]), "q5_1": ("Q5_1", *K_TYPES[4:]),
    "iq2_xxs": I_TYPES, "iq2_xs": I_TYPES[1:], "iq2_s": I_TYPES[1:], "iq2_m": I_TYPES[2:],
    "iq3_xxs": I_TYPES[3:], "iq3_xs": I_TYPES[3:], "iq3_s": I_TYPES[4:], "iq3_m": I_TYPES[4:],
    "iq4_nl": ("IQ4_NL", *K_TYPES[3:]), "iq4_xs": ("IQ4_XS", *K_TYPES[2:]),
}  # fmt: skip
EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})
# mxfp4_moe is asked for its kernels: experts keep MXFP4 but in the first layers.
MXFP4_LADDERS = {True: ("MXFP4", *K_TYPES[2:]), False: ("MXFP4",)}

# KL against that of the same tensors in Q4_K.
ERROR = {
    "IQ2_XXS": 28.0, "IQ2_XS": 21.0, "Q2_K": 25.0, "IQ2_S": 14.0, "IQ3_XXS": 6.9, "Q3_K": 4.7,
    "IQ3_S": 3.8, "MXFP4": 2.6, "Q4_0": 1.5, "IQ4_XS": 1.19, "IQ4_NL": 1.15,
    "Q4_1": 1.1, "Q4_K": 1.0, "Q5_0": 0.36, "Q5_1": 0.28, "Q5_K": 0.26, "Q6_K": 0.064,
    "Q8_0": 0.0057, "F16": 0.0,
}  # fmt: skip
# KL of a whole kind in Q4_K, in 1e-3 nats, first layers' excess left out: dense, beside experts.
SENSITIVITY = {
    "token_embd": (3.9, 10.0), "output": (5.3, 6.2),
    "attn_qkv": (3.6, 12.0), "attn_gate": (2.1, 8.0), "ssm_out": (3.2, 10.0),
    "attn_q": (0.5, 1.8), "attn_k": (0.5, 1.4), "attn_v": (0.9, 5.4), "attn_output": (0.6, 3.0),
    "ffn_gate": (1.6, 1.6), "ffn_up": (1.3, 1.3), "ffn_down": (2.0, 2.0),
    "ffn_gate_shexp": (1.4, 1.4), "ffn_up_shexp": (1.3, 1.3), "ffn_down_shexp": (2.0, 2.0),
    "ffn_gate_exps": (3.0, 3.0), "ffn_up_exps": (2.5, 2.5), "ffn_down_exps": (4.0, 4.0),
}  # fmt: skip
# The first sixteenth of the layers, one at least, is that much more sensitive than another.
FIRST_SHARE = 16
FIRST_FFN, FIRST_MIXER = 6.0, 2.5
FIXED = {"ssm_alpha": "F32", "ssm_beta": "F32", "nextn.eh_proj": "Q8_0"}
WHY = {"F32": "the delta rule compounds its error", "Q8_0": "the MTP head's entry"}


@dataclass(slots=True)
class _Group:
    """Tensors of one kind and depth, which share a type: the `level`-th of `types`."""

    tensors: list[MixTensor]
    types: tuple[str, ...]
    nbytes: list[int]
    weight: float
    level: int = 0


def pick(
    mix: str, tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> dict[str, tuple[str, str]]:
    """Return type and reason by the name of each free tensor.

    tensors  all of the file
    free     those that no rule decides and that are not always F32
    """
    theirs = llama_cpp.pick(mix, tensors, facts, free)
    if mix in PLAIN:
        return theirs
    budget = BUDGET * sum(_nbytes(tensor, theirs[tensor.name][0]) for tensor in free)
    fixed = {
        t.name: (FIXED[t.kind], f"ours: {WHY[FIXED[t.kind]]}") for t in free if t.kind in FIXED
    }
    budget -= sum(_nbytes(tensor, fixed[tensor.name][0]) for tensor in free if tensor.name in fixed)
    groups = list(_groups(mix, tensors, facts, [t for t in free if t.name not in fixed]))
    _raise_within(groups, budget)
    return fixed | dict(_named(mix, groups))


def _nbytes(tensor: MixTensor, type_: str) -> int:
    columns = tensor.shape[-1]
    return prod(tensor.shape[:-1]) * codec.row_bytes(codec.fallback(type_, columns), columns)


def _groups(
    mix: str, tensors: Sequence[MixTensor], facts: Facts, free: Sequence[MixTensor]
) -> Iterator[_Group]:
    """Part tensors by kind and depth; a group's weight is what its loss is at error 1."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.block < facts.num_layers:
            counts[tensor.kind] = counts.get(tensor.kind, 0) + 1
    parted: dict[tuple[str, bool], list[MixTensor]] = {}
    for tensor in free:
        parted.setdefault((tensor.kind, is_first(tensor.block, facts)), []).append(tensor)
    for (kind, first), members in parted.items():
        columns = members[0].shape[-1]
        types = tuple(dict.fromkeys(codec.fallback(t, columns) for t in _ladder(mix, kind, first)))
        nbytes = [sum(_nbytes(member, type_) for member in members) for type_ in types]
        weight = (
            len(members) * sensitivity_of(kind, facts, first=first) / max(1, counts.get(kind, 0))
        )
        yield _Group(members, types, nbytes, weight)


def _ladder(mix: str, kind: str, first: bool) -> tuple[str, ...]:  # noqa: FBT001 - private
    """Return the types that a kind may have; no importance is known of an embedding."""
    if mix == "mxfp4_moe" and kind in EXPERTS:
        return MXFP4_LADDERS[first]
    if kind == "token_embd":
        return tuple("Q2_K" if t in codec.POOR_UNWEIGHTED else t for t in LADDERS[mix])
    return LADDERS[mix]


def is_first(block: int, facts: Facts) -> bool:
    """Whether a block is one of the first layers, which are more sensitive than others."""
    return 0 <= block < max(1, facts.num_layers // FIRST_SHARE)


def sensitivity_of(kind: str, facts: Facts, *, first: bool) -> float:
    """Return the sensitivity of a kind as a whole, if all its layers were like this one.

    It is what all tensors of a kind ("ffn_down") cost in Q4_K, in 1e-3 nats a token.
    """
    column = 1 if facts.num_experts else 0
    sensitivity = SENSITIVITY[kind][column]
    if kind == "token_embd" and facts.tied:
        sensitivity += SENSITIVITY["output"][column]
    if not first:
        return sensitivity
    return sensitivity * (FIRST_FFN if kind.startswith("ffn_") else FIRST_MIXER)


def _raise_within(groups: Sequence[_Group], budget: float) -> None:
    """Take the steps up that save most for a byte, as long as there is budget."""
    left = budget - sum(group.nbytes[0] for group in groups)
    while True:
        steps = [
            (_saving(group, level), group, level)
            for group in groups
            for level in range(group.level + 1, len(group.types))
            if group.nbytes[level] - group.nbytes[group.level] <= left
        ]
        saving, group, level = max(steps, key=lambda step: step[0], default=(0.0, None, 0))
        if group is None or saving <= 0:
            return
        left -= group.nbytes[level] - group.nbytes[group.level]
        group.level = level


def _saving(group: _Group, level: int) -> float:
    """Return the loss saved for a byte; infinite if a byte is saved as well."""
    loss = group.weight * (ERROR[group.types[group.level]] - ERROR[group.types[level]])
    more = group.nbytes[level] - group.nbytes[group.level]
    return loss / more if more > 0 else loss * float("inf") if loss > 0 else 0.0


def _named(mix: str, groups: Sequence[_Group]) -> Iterator[tuple[str, tuple[str, str]]]:
    for group in groups:
        type_ = group.types[group.level]
        raised = f", raised from {group.types[0]}" if group.level else ""
        for tensor in group.tensors:
            yield tensor.name, (type_, f"ours: {mix}{raised}")
