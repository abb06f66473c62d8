"""Which ggml type each tensor of a GGUF file gets: a mix, by llama.cpp's rules or by ours.

    rule that matches  >  role that stays F32  >  the mix  >  what the length of a row allows

A mix is what people call a quantised file ("q4_k_m"): a type for most tensors, another for some.
`quant.mix.llama_cpp` repeats what llama-quantize chooses, tensor by tensor, to be compared
with; `quant.mix.ours` spends about as many bytes and loses less. A tensor of experts holds
those of a layer, so it has one type: a rule that would part them is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from quant.errors import QuantError
from quant.ggml import codec as ggml
from quant.mix import llama_cpp as gguf_mix_llama_cpp
from quant.mix import ours as gguf_mix_ours
from quant.policy import PROTECTED, PolicyRule, first_matches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# general.file_type, the ids of llama.h's llama_ftype.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32, "mxfp4_moe": 38,
}  # fmt: skip

# What the delta rule compounds: llama.cpp reads these in any type, but few are good enough.
DELTA = frozenset({"in_proj_a", "in_proj_b"})
DELTA_TYPES = ("F32", "F16", "BF16", "Q8_0")
ALWAYS_F32 = PROTECTED - DELTA - {"mtp_fc", "vision"}
TOP = -1


@dataclass(frozen=True, slots=True)
class MixTensor:
    """A tensor of the file: its GGUF name and shape (rows, columns), whatever the source.

    weights  our names of what it holds: one, or one for each expert
    """

    name: str
    role: str
    shape: tuple[int, ...]
    weights: tuple[str, ...]

    @property
    def block(self) -> int:
        """N of `blk.N.`, or -1."""
        head, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if head == "blk" else TOP

    @property
    def kind(self) -> str:
        """The name without block and ending: `attn_qkv`, `nextn.eh_proj`, `token_embd`."""
        rest = self.name if self.block == TOP else self.name.split(".", 2)[2]
        return rest.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a mix depends on besides the tensors.

    num_layers   decoder layers; blocks from there on are the MTP head's
    num_experts  0 for a dense model
    gqa          query heads per key head
    tied         the head is the embedding
    imatrix      an importance matrix is used
    """

    num_layers: int
    num_experts: int
    gqa: int
    tied: bool
    imatrix: bool


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
        raise _unknown("mix", mix, FILE_TYPES)
    ruled = _ruled(tensors, rules)
    free = [t for t in tensors if t.name not in ruled and t.role not in ALWAYS_F32]
    chosen = ruled | {
        t.name: Choice("F32", f"always F32: {t.role}") for t in tensors if t.role in ALWAYS_F32
    }
    pick = gguf_mix_llama_cpp.pick if like_llama_cpp else gguf_mix_ours.pick
    for name, (type_, reason) in pick(mix, tensors, facts, free).items():
        chosen[name] = Choice(type_, reason)
    return {tensor.name: _fit(tensor, chosen[tensor.name]) for tensor in tensors}


def _fit(tensor: MixTensor, choice: Choice) -> Choice:
    """Return the choice, or what llama.cpp takes instead if a row is not whole blocks of it."""
    columns = tensor.shape[-1]
    fits = ggml.fallback(choice.type, columns)
    if fits == choice.type:
        return choice
    reason = f"{fits}, for {columns} columns are no whole blocks of {choice.type}"
    return Choice(fits, f"{choice.reason}; {reason}", fallback=True)


def _ruled(tensors: Sequence[MixTensor], rules: Sequence[PolicyRule]) -> dict[str, Choice]:
    """Return what the rules decide."""
    for rule in rules:
        if rule.scheme.upper() not in ggml.WRITABLE:
            raise _unknown("type", rule.scheme, [name.lower() for name in ggml.WRITABLE])
    winners = first_matches(rules, [weight for tensor in tensors for weight in tensor.weights])
    ruled = {}
    for tensor in tensors:
        winner = _one_rule(tensor, winners)
        if winner is not None:
            _check_allowed(tensor, winner)
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


def _check_allowed(tensor: MixTensor, rule: PolicyRule) -> None:
    """Raise QuantError if the rule gives a type to a tensor that may not have it."""
    allowed = ("F32",) if tensor.role in ALWAYS_F32 else DELTA_TYPES
    free = tensor.role not in ALWAYS_F32 | DELTA
    if free or rule.scheme.upper() in allowed:
        return
    raise QuantError(
        f"rule {rule.match} gives {rule.scheme} to {tensor.weights[0]}, whose role {tensor.role} "
        f"is protected,\n  expected {' or '.join(t.lower() for t in allowed)}, "
        "or a glob that does not match it"
    )


def _unknown(what: str, got: str, known: Sequence[str] | Mapping[str, int]) -> QuantError:
    nearest = get_close_matches(got, known) or list(known)
    return QuantError(f"{what} {got!r} is not known,\n  expected {' or '.join(nearest)}")
