"""Which ggml type each tensor of a GGUF file gets: a mix, by llama.cpp's rules or by ours.

    rule that matches  >  role that stays F32  >  the mix  >  what the length of a row allows

A mix is what people call a quantised file ("q4_k_m"): a type for most tensors, another for some.
`quant.mix.llama_cpp` repeats what llama-quantize chooses, tensor by tensor, to be compared
with; `quant.mix.ours` spends about as many bytes and loses less. A tensor of experts holds
those of a layer, so it has one type: a rule that would part them is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.family.roles import ROLES
from formats.nearest import one_of
from quant.errors import QuantError
from quant.ggml import kinds
from quant.mix import llama_cpp, nvfp4, ours
from quant.mix.tensors import Facts, MixTensor
from quant.policy import PolicyRule, first_matches
from quant.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# general.file_type, the ids of llama.h's llama_ftype.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "q2_k_s": 21, "iq3_xs": 22,
    "iq3_xxs": 23, "iq4_nl": 25, "iq3_s": 26, "iq3_m": 27, "iq2_s": 28, "iq2_m": 29, "iq4_xs": 30,
    "bf16": 32, "mxfp4_moe": 38, "nvfp4": 39,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """What a tensor gets, and why; `fallback`: its rows do not fit what was asked for."""

    type: str
    reason: str
    fallback: bool = False


def choose(
    mix: str,
    tensors: Sequence[MixTensor],
    facts: Facts,
    rules: Sequence[PolicyRule] = (),
    *,
    like_llama_cpp: bool = False,
) -> dict[str, Choice]:
    """Return the type of every tensor by its name, in their order.

    rules  globs over our names and ggml types ("q6_k"); the first that matches decides

    Raises QuantError for a mix or a type that is not known, and for a rule that decides nothing,
    parts the experts of a tensor, or gives a type to a tensor that may not have it.
    """
    if mix not in FILE_TYPES:
        raise unknown("mix", mix, FILE_TYPES)
    ruled = _ruled(tensors, rules, facts)
    free = [t for t in tensors if t.name not in ruled and not ROLES[t.role].gguf_f32]
    chosen = ruled | {
        t.name: Choice("F32", f"always F32: {t.role}") for t in tensors if ROLES[t.role].gguf_f32
    }
    for name, (type_, reason) in _pick(mix, tensors, facts, free, like_llama_cpp).items():
        chosen[name] = Choice(type_, reason)
    return {tensor.name: _fit(tensor, chosen[tensor.name]) for tensor in tensors}


def _pick(
    mix: str,
    tensors: Sequence[MixTensor],
    facts: Facts,
    free: Sequence[MixTensor],
    like_llama_cpp: bool,  # noqa: FBT001 - private
) -> dict[str, tuple[str, str]]:
    """Return type and reason of each free tensor."""
    if mix == nvfp4.MIX:
        return nvfp4.pick(facts, free)
    return (llama_cpp.pick if like_llama_cpp else ours.pick)(mix, tensors, facts, free)


def _fit(tensor: MixTensor, choice: Choice) -> Choice:
    """Return the choice, or what llama.cpp takes instead if a row is not whole blocks of it."""
    columns = tensor.shape[-1]
    fits = kinds.fallback(choice.type, columns)
    if fits == choice.type:
        return choice
    reason = f"{fits}, for {columns} columns are not whole blocks of {choice.type}"
    return Choice(fits, f"{choice.reason}; {reason}", fallback=True)


def _ruled(
    tensors: Sequence[MixTensor], rules: Sequence[PolicyRule], facts: Facts
) -> dict[str, Choice]:
    """Return what the rules decide."""
    if not rules:
        return {}
    for rule in rules:
        if rule.scheme.upper() not in kinds.WRITABLE:
            raise unknown("type", rule.scheme, [name.lower() for name in kinds.WRITABLE])
    winners = first_matches(rules, [weight for tensor in tensors for weight in tensor.weights])
    ruled = {}
    for tensor in tensors:
        winner = _one_rule(tensor, winners)
        if winner is not None:
            _check_allowed(tensor, winner, facts)
            ruled[tensor.name] = Choice(winner.scheme.upper(), f"rule {winner.match}")
    return ruled


def _one_rule(tensor: MixTensor, winners: Mapping[str, PolicyRule | None]) -> PolicyRule | None:
    """Return the rule for all of a tensor's weights, if there is one."""
    first = winners[tensor.weights[0]]
    for weight in tensor.weights[1:]:
        other = winners[weight]
        if _scheme(other) != _scheme(first):
            raise QuantError(
                f"{tensor.name} holds all experts in one type, but the rules would part them,\n"
                f"  {tensor.weights[0]}  {_scheme(first)}\n"
                f"  {weight}  {_scheme(other)}\n"
                "  expected a rule that matches all of them or none"
            )
    return first


def _scheme(rule: PolicyRule | None) -> str:
    return "by the mix" if rule is None else f"{rule.scheme} (rule {rule.match})"


def _check_allowed(tensor: MixTensor, rule: PolicyRule, facts: Facts) -> None:
    """Raise QuantError if the rule gives a type to a tensor that may not have it."""
    is_scaled = rule.scheme.upper() == nvfp4.TYPE
    place = nvfp4.without_scale(tensor, facts) if is_scaled else None
    if place:
        raise QuantError(
            f"rule {rule.match} gives {rule.scheme} to {tensor.weights[0]},\n"
            f"  expected another type: llama.cpp reads no {nvfp4.TYPE} scale of {place}"
        )
    role = ROLES[tensor.role]
    if role.gguf_takes(rule.scheme.upper()):
        return
    raise QuantError(
        f"rule {rule.match} gives {rule.scheme} to {tensor.weights[0]}, whose role {tensor.role} "
        f"is protected,\n  expected {one_of(t.lower() for t in role.gguf)}, "
        "or a glob that does not match it"
    )
