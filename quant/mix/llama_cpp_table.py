"""The tables of llama-quantize: which type a class of tensors gets where a condition holds.

    Place       where a tensor is: the i-th of n of its class
    DEFAULTS    of each mix the type of everything else
    TABLE       of each mix and class, the first type whose condition holds
    HEADS       of each mix the output matrix, or the embedding if that is the head; else Q6_K

Source: llama.cpp's src/llama-quant.cpp at b11434; the tests hold its own output.

Trap: everywhere a place beside experts is the block's number, but mixes of IQ2 count ffn_down, of
which a block has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = ("f32", "f16", "bf16")
MIXTRAL = 8
FEW_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: the i-th of n of its class, in a model of these facts.

    counted  how many of its class came before; i is the block's number beside experts
    """

    i: int
    n: int
    counted: int
    gqa: int
    experts: int
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


def _first_counted(at: Place) -> bool:
    return at.counted < at.n // 8


def _between(at: Place) -> bool:
    """Hold in all but the first and the last eighth."""
    return at.n // 8 <= at.i < 7 * at.n // 8


def _wide_gqa(at: Place) -> bool:
    return at.gqa >= 4


def _wide_gqa_or_experts(at: Place) -> bool:
    return at.gqa >= 4 or at.experts >= FEW_EXPERTS


def _no_imatrix(at: Place) -> bool:
    return not at.imatrix


def _first_eighth_if(*, imatrix: bool) -> Callable[[Place], bool]:
    return lambda at: at.i < at.n // 8 and at.imatrix is imatrix


Condition = tuple[str, "Callable[[Place], bool]"]
Rules = dict[str, tuple[Condition, ...]]
V, K, Q, OUT = "attn_v", "attn_k", "attn_q", "attn_output"
DOWN, GATE, UP, EMBED = "ffn_down", "ffn_gate", "ffn_up", "token_embd"
CLASSES = {
    "attn_v": V, "attn_qkv": V, "attn_k": K, "attn_q": Q, "attn_output": OUT,
    "ffn_down": DOWN, "ffn_down_exps": DOWN, "ffn_down_shexp": DOWN,
    "ffn_gate": GATE, "ffn_gate_exps": GATE, "ffn_gate_shexp": GATE,
    "ffn_up": UP, "ffn_up_exps": UP, "ffn_up_shexp": UP, "token_embd": EMBED,
}  # fmt: skip
DEFAULTS = {
    "q2_k": "Q2_K", "q2_k_s": "Q2_K", "q3_k_s": "Q3_K", "q3_k_m": "Q3_K", "q3_k_l": "Q3_K",
    "q4_k_s": "Q4_K", "q4_k_m": "Q4_K", "q5_k_s": "Q5_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K",
    "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q8_0": "Q8_0",
    "iq2_xxs": "IQ2_XXS", "iq2_xs": "IQ2_XS", "iq2_s": "IQ2_XS", "iq2_m": "IQ2_S",
    "iq3_xxs": "IQ3_XXS", "iq3_xs": "IQ3_S", "iq3_s": "IQ3_S", "iq3_m": "IQ3_S",
    "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS", "mxfp4_moe": "MXFP4", "nvfp4": "NVFP4",
}  # fmt: skip
HEADS = {
    "mxfp4_moe": "Q8_0", "nvfp4": "Q8_0", "q8_0": "Q8_0", "iq2_xxs": "Q5_K", "iq2_xs": "Q5_K",
    "iq2_s": "Q5_K", "iq2_m": "Q5_K", "iq3_xxs": "Q5_K",
}  # fmt: skip
_IQ4: Rules = {
    V: (("Q5_K", _wide_gqa),),
    DOWN: (("Q5_K", _first_eighth_if(imatrix=False)),),
}
_M: Rules = {V: (("Q6_K", _more_bits),), DOWN: (("Q6_K", _more_bits),)}
_IQ2: Rules = {
    V: (("Q4_K", _wide_gqa_or_experts), ("Q2_K", _always)),
    DOWN: (("Q2_K", _first_counted),), EMBED: (("Q2_K", _always),),
}  # fmt: skip
_IQ2_M: Rules = {
    V: (("Q4_K", _wide_gqa_or_experts), ("IQ3_S", _always)),
    DOWN: (("IQ3_S", _first_counted),),
    **dict.fromkeys((EMBED, OUT), (("IQ3_S", _always),)),
}
TABLE: dict[str, Rules] = {
    "q2_k": {
        V: (("Q4_K", _wide_gqa), ("Q3_K", _always)),
        DOWN: (("Q3_K", _always),), OUT: (("Q3_K", _always),),
    },
    "q2_k_s": {V: (("Q4_K", _wide_gqa),), DOWN: (("Q4_K", _first_share(8)),)},
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
    "iq2_xxs": _IQ2, "iq2_xs": _IQ2, "iq2_s": _IQ2_M, "iq2_m": _IQ2_M,
    "iq3_xxs": {
        V: (("Q4_K", _wide_gqa), ("IQ3_S", _no_imatrix)),
        DOWN: (("Q4_K", _first_eighth_if(imatrix=False)), ("Q3_K", _no_imatrix)),
        **dict.fromkeys((K, Q), (("IQ2_S", _always),)),
        **dict.fromkeys((EMBED, OUT), (("IQ3_S", _always),)),
    },
    "iq3_xs": {
        V: (("Q4_K", _wide_gqa),),
        **dict.fromkeys((GATE, UP), (("IQ3_XXS", _between),)),
        **dict.fromkeys((K, Q), (("IQ3_XXS", _always),)),
    },
    "iq3_s": {V: (("Q4_K", _wide_gqa),)},
    "iq3_m": {
        **dict.fromkeys((V, OUT), (("Q4_K", _always),)), DOWN: (("Q4_K", _first_share(8)),),
    },
    "iq4_nl": _IQ4,
    "iq4_xs": _IQ4,
}  # fmt: skip
IQ2 = frozenset({"iq2_xxs", "iq2_xs", "iq2_s", "iq2_m"})
MIXTRAL_OUT = frozenset({
    "q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m",
    "iq4_nl", "iq4_xs",
})  # fmt: skip


def rules_of(mix: str, num_experts: int) -> Rules:
    """Return the rules of a mix; exactly eight experts are taken for Mixtral."""
    table = dict(TABLE.get(mix, {}))
    if num_experts != MIXTRAL:
        return table
    if mix in IQ2:
        return table | {K: (("Q4_K", _always),), OUT: (("Q5_K", _always),)}
    if mix == "iq3_m":
        table[DOWN] = (("Q4_K", _more_bits),)
    table |= dict.fromkeys((V, K), (("Q8_0", _always),))
    table[OUT] = (("Q5_K", _always),) if mix in MIXTRAL_OUT else ()
    return table
