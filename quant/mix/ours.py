"""Our mixes: no more bytes than llama.cpp's of the same name, spent where they save most.

    loss = sum over tensors of   sensitivity(kind, place) * error(type)      [KL, 1e-3 nats a token]

A tensor may have any type of the mix's family that is not far below the mix's own. From the
smallest of each, the step up that saves most loss for a byte is taken as long as the file stays
within llama.cpp's. This is why the types depend on the model: a mixture of experts has nearly all
its bytes in experts, so everything beside them is raised, while a dense model pays for the
embeddings, the delta rule and the first layer with gate and up projections of the others.
llama.cpp instead gives Q6_K to half of attn_qkv and ffn_down, whose other half then dominates the
loss, and Q5_K or Q6_K to the head.

What the delta rule compounds (ssm_alpha, ssm_beta) is F32: llama.cpp rounds the other factor to the
weight's type, so BF16 would not do. The MTP head's entry is Q8_0, and the rest of its block is
treated as one more layer, but never below the mix's own type: the model's KL does not show what it
loses, and llama.cpp's importance matrices do not know it. The tables are in `ours_table`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from quant.ggml import kinds
from quant.mix import llama_cpp
from quant.mix.llama_cpp_table import PLAIN
from quant.mix.ours_table import (
    BELOW,
    ERROR,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    FIRST,
    FIXED,
    LADDERS,
    LAST,
    MIDDLE,
    MIXER,
    OWN,
    OWN_AND_ABOVE,
    SENSITIVITY,
    SHARE,
    UNWEIGHTED_ERROR,
    WHY,
)
from quant.mix.spend import Option, hull, spend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quant.mix.tensors import Facts, MixTensor

EMBEDDING, HEAD = "token_embd", "output"


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
    budget = sum(_nbytes(tensor, theirs[tensor.name][0]) for tensor in free)
    fixed = {
        t.name: (FIXED[t.kind], f"ours: {WHY[FIXED[t.kind]]}") for t in free if t.kind in FIXED
    }
    budget -= sum(_nbytes(tensor, fixed[tensor.name][0]) for tensor in free if tensor.name in fixed)
    layers = Counter(t.kind for t in tensors if t.block < facts.num_layers)
    others = sorted((t for t in free if t.name not in fixed), key=lambda t: (t.block, t.name))
    hulls = _hulls(mix, others, facts, layers)
    return fixed | {
        tensor.name: (option.form, _reason(mix, tensor, option.form))
        for tensor, option in zip(others, spend(hulls, budget), strict=True)
    }


def _nbytes(tensor: MixTensor, type_: str) -> int:
    columns = tensor.shape[-1]
    return prod(tensor.shape[:-1]) * kinds.row_bytes(kinds.fallback(type_, columns), columns)


def _hulls(
    mix: str, free: Sequence[MixTensor], facts: Facts, layers: Mapping[str, int]
) -> list[list[Option]]:
    """Return the types of use for each tensor, with what they lose."""
    alike: dict[tuple[object, ...], list[Option]] = {}
    hulls = []
    for tensor in free:
        place = place_of(tensor.block, facts)
        weighed = tensor.name not in facts.unknown, tensor.block < facts.num_layers
        key = tensor.kind, place, tensor.shape, weighed
        if key not in alike:
            loss = sensitivity_of(tensor.kind, facts, place) / max(1, layers[tensor.kind])
            alike[key] = hull(_options(mix, tensor, facts, loss))
        hulls.append(alike[key])
    return hulls


def _options(mix: str, tensor: MixTensor, facts: Facts, loss: float) -> list[Option]:
    """Return the types that a tensor may have; `loss` is that of an error of 1."""
    columns, known = tensor.shape[-1], tensor.name not in facts.unknown
    weighed = facts.imatrix and tensor.block < facts.num_layers and known
    errors = ERROR if weighed and tensor.kind != EMBEDDING else UNWEIGHTED_ERROR
    allowed = _ladder(mix, tensor.kind, imatrix=weighed)
    types = dict.fromkeys(kinds.fallback(type_, columns) for type_ in allowed)
    return [Option(_nbytes(tensor, type_), loss * errors[type_], type_) for type_ in types]


@cache
def _ladder(mix: str, kind: str, *, imatrix: bool) -> tuple[str, ...]:
    """Return the types that a kind may have: of an embedding no importance is known."""
    ladder, own = LADDERS[mix], OWN[mix]
    if mix == "mxfp4_moe" and kind in EXPERTS:  # it is asked for its kernels
        return (own,)
    if mix in OWN_AND_ABOVE:
        return ladder
    least = _bits(own) - (BELOW if imatrix else 0.0)
    return tuple(t for t in ladder if _bits(t) >= least and t not in _poor(own, kind, imatrix))


def _poor(own: str, kind: str, imatrix: bool) -> frozenset[str]:  # noqa: FBT001 - private
    """Return the types not to give: a mix that is itself poor without a matrix is refused later."""
    if imatrix or own in kinds.POOR_UNWEIGHTED:
        unweighed = kind == EMBEDDING or (kind == HEAD and not imatrix)
        return kinds.WEIGHTED_ONLY if unweighed else frozenset()
    return kinds.POOR_UNWEIGHTED


@cache
def _bits(type_: str) -> float:
    columns, size = kinds.block(type_)
    return 8 * size / columns


def place_of(block: int, facts: Facts) -> str:
    """Return whether a block is one of the first layers, of the last, or none of these."""
    few = max(1, facts.num_layers // SHARE)
    if 0 <= block < few:
        return FIRST
    return LAST if facts.num_layers - few <= block < facts.num_layers else MIDDLE


def sensitivity_of(kind: str, facts: Facts, place: str) -> float:
    """Return the sensitivity of a kind as a whole, if all its layers were in this place.

    It is what all tensors of a kind ("ffn_down") cost in Q4_K, in 1e-3 nats a token.
    """
    column = 1 if facts.num_experts else 0
    sensitivity = SENSITIVITY[kind][column]
    if kind == EMBEDDING and facts.tied:
        sensitivity += SENSITIVITY["output"][column]
    if kind in EXPERTS:
        return sensitivity * EXPERT_FFN[place]
    return sensitivity * (FFN if kind.startswith("ffn_") else MIXER)[place][column]


def _reason(mix: str, tensor: MixTensor, type_: str) -> str:
    own = kinds.fallback(OWN[mix], tensor.shape[-1])
    return f"ours: {mix}" if type_ == own else f"ours: {mix}, instead of {own}"
