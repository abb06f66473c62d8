"""The tables of our mixes: which types a mix may use, what a type and a kind of tensor cost.

    OWN           of each mix the type that it is called after
    LADDERS       of each mix the types of its family
    ERROR         of a type: KL against that of the same tensors in Q4_K
    SENSITIVITY   of a kind of tensor: KL of all of it in Q4_K

Source: costs of every tensor of two small trained models in every type (`qwen35 sensitivity`),
checked against the KL of whole mixes. Errors of a type are alike to a few percent in both models
and in all their tensors, so they are taken for facts of the type; sensitivities are rounded.
Traps: what was set by judgement is attention, doubled because those texts are short. The errors of
Q4_1 and MXFP4 are older figures. That a deeper model spreads the same loss of a kind over more
layers is an assumption: no released model was measured.
"""

from __future__ import annotations

from quant.mix.llama_cpp_table import DEFAULTS

# llama.cpp's iq3_xs is named IQ3_S by default, and is IQ3_XXS in the middle.
OWN = DEFAULTS | {"iq3_xs": "IQ3_XXS"}
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
I_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", *K_TYPES)
# Asked for by people whose kernels like the type: nothing is below it.
OWN_AND_ABOVE = {
    "q8_0": ("Q8_0",), "mxfp4_moe": ("Q8_0",),
    "q4_0": ("Q4_0", *K_TYPES[3:]), "q4_1": ("Q4_1", *K_TYPES[3:]),
    "q5_0": ("Q5_0", *K_TYPES[4:]), "q5_1": ("Q5_1", *K_TYPES[4:]),
    "iq4_nl": ("IQ4_NL", *K_TYPES[3:]),
}  # fmt: skip
LADDERS = (
    OWN_AND_ABOVE
    | dict.fromkeys(
        ("q2_k", "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m",
         "q6_k"), K_TYPES)
    | dict.fromkeys(
        ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "iq4_xs"),
        I_TYPES)
)  # fmt: skip
# Bits that a type may be below the mix's own, where an importance matrix says what matters.
BELOW = 1.125
EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})

ERROR = {
    "IQ2_XXS": 23.4, "IQ2_XS": 17.8, "IQ2_S": 12.3, "Q2_K": 14.3, "IQ3_XXS": 6.5, "IQ3_S": 3.7,
    "Q3_K": 4.2, "MXFP4": 2.6, "Q4_0": 1.34, "IQ4_XS": 1.15, "IQ4_NL": 1.12, "Q4_1": 1.1,
    "Q4_K": 1.0, "Q5_0": 0.33, "Q5_K": 0.25, "Q5_1": 0.23, "Q6_K": 0.06, "Q8_0": 0.0058, "F16": 0.0,
}  # fmt: skip
# Without an importance matrix, as always of an embedding, against Q4_K without one.
UNWEIGHTED_ERROR = ERROR | {
    "IQ2_S": 13.8, "Q2_K": 17.3, "IQ3_XXS": 8.9, "IQ3_S": 5.4, "Q3_K": 4.5, "Q4_0": 1.45,
    "Q5_0": 0.36, "Q5_1": 0.28,
}  # fmt: skip
# In 1e-3 nats, if all layers were like a middle one: dense, beside experts.
SENSITIVITY = {
    "token_embd": (4.1, 14.0), "output": (5.2, 6.2),
    "attn_qkv": (3.2, 8.0), "attn_gate": (2.3, 5.0), "ssm_out": (3.2, 7.0),
    "attn_q": (0.5, 1.8), "attn_k": (0.5, 1.2), "attn_v": (0.9, 4.8), "attn_output": (0.6, 3.0),
    "ffn_gate": (1.6, 1.6), "ffn_up": (1.4, 1.4), "ffn_down": (1.7, 1.7),
    "ffn_gate_shexp": (0.8, 0.8), "ffn_up_shexp": (0.8, 0.8), "ffn_down_shexp": (1.2, 1.2),
    "ffn_gate_exps": (3.0, 3.0), "ffn_up_exps": (3.0, 3.0), "ffn_down_exps": (4.2, 4.2),
}  # fmt: skip
# The first and the last sixteenth of the layers, one each at least, are more sensitive than others:
# factors of the feed-forward part and of the mixer.
SHARE = 16
FIRST, MIDDLE, LAST = "first", "middle", "last"
FFN = {FIRST: (7.0, 2.0), MIDDLE: (1.0, 1.0), LAST: (1.7, 1.7)}
EXPERT_FFN = {FIRST: 1.2, MIDDLE: 1.0, LAST: 1.7}
MIXER = {FIRST: (2.0, 2.5), MIDDLE: (1.0, 1.0), LAST: (1.0, 1.0)}
FIXED = {"ssm_alpha": "F32", "ssm_beta": "F32", "nextn.eh_proj": "Q8_0"}
WHY = {"F32": "the delta rule compounds its error", "Q8_0": "the MTP head's entry"}
