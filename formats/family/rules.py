"""The Qwen3.5 family as one table: every kind of tensor, its shape in symbols, its role.

A name in the table is the hub's name without its namespace: `layers.{i}.mlp.down_proj.weight`
stands for `model.language_model.layers.3...` of a vision-language checkpoint and for
`model.layers.3...` of a text-only one. Without `.weight` it is our name of the tensor, the one
recipes match. A shape is a comma-separated list of sums of products; symbols are in
`config_fields`. `slots` writes the table out for a model.

Source: the published checkpoints; the test of this module derives their tensor counts and byte
totals from this table. Trap: four norms use two formulas, so `gdn_norm` (plain w) is not a `norm`
(1 + w), and experts carry no `.weight` when fused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One kind of tensor. `{i}` is a layer (or vision block), `{e}` an expert.

    `gguf` is its name in a GGUF file, in a layer without `blk.N.`; experts are stacked there.
    """

    hub: str
    shape: str
    role: str
    gguf: str = ""

    @property
    def name(self) -> str:
        """Our name: the hub's without `.weight`."""
        return self.hub.removesuffix(".weight")


TOP = (
    TensorRule("embed_tokens.weight", "V, H", "embed", "token_embd.weight"),
    TensorRule("norm.weight", "H", "norm", "output_norm.weight"),
)
HEAD = (TensorRule("lm_head.weight", "V, H", "lm_head", "output.weight"),)

LAYER_NORMS = (
    TensorRule("input_layernorm.weight", "H", "norm", "attn_norm.weight"),
    TensorRule("post_attention_layernorm.weight", "H", "norm", "post_attention_norm.weight"),
)
GDN_IN = (
    TensorRule(
        "linear_attn.in_proj_qkv.weight", "2*NK*DK+NV*DV, H", "in_proj_qkv", "attn_qkv.weight"
    ),
    TensorRule("linear_attn.in_proj_z.weight", "NV*DV, H", "in_proj_z", "attn_gate.weight"),
    TensorRule("linear_attn.in_proj_b.weight", "NV, H", "in_proj_b", "ssm_beta.weight"),
    TensorRule("linear_attn.in_proj_a.weight", "NV, H", "in_proj_a", "ssm_alpha.weight"),
)
# Qwen3-Next fuses the four, grouped by key head: q, k, v, z of head 0, then of head 1, ...
GDN_IN_NEXT = (
    TensorRule("linear_attn.in_proj_qkvz.weight", "2*NK*DK+2*NV*DV, H", "in_proj_qkvz"),
    TensorRule("linear_attn.in_proj_ba.weight", "2*NV, H", "in_proj_ba"),
)
GDN = (
    TensorRule("linear_attn.conv1d.weight", "2*NK*DK+NV*DV, 1, K", "conv1d", "ssm_conv1d.weight"),
    TensorRule("linear_attn.dt_bias", "NV", "dt_bias", "ssm_dt.bias"),
    TensorRule("linear_attn.A_log", "NV", "A_log", "ssm_a"),
    TensorRule("linear_attn.norm.weight", "DV", "gdn_norm", "ssm_norm.weight"),
    TensorRule("linear_attn.out_proj.weight", "H, NV*DV", "out_proj", "ssm_out.weight"),
)
ATTENTION = (
    TensorRule("self_attn.q_proj.weight", "2*NH*HD, H", "q_proj", "attn_q.weight"),
    TensorRule("self_attn.k_proj.weight", "NKV*HD, H", "k_proj", "attn_k.weight"),
    TensorRule("self_attn.v_proj.weight", "NKV*HD, H", "v_proj", "attn_v.weight"),
    TensorRule("self_attn.o_proj.weight", "H, NH*HD", "o_proj", "attn_output.weight"),
    TensorRule("self_attn.q_norm.weight", "HD", "norm", "attn_q_norm.weight"),
    TensorRule("self_attn.k_norm.weight", "HD", "norm", "attn_k_norm.weight"),
)
MLP = (
    TensorRule("mlp.gate_proj.weight", "I, H", "gate_proj", "ffn_gate.weight"),
    TensorRule("mlp.up_proj.weight", "I, H", "up_proj", "ffn_up.weight"),
    TensorRule("mlp.down_proj.weight", "H, I", "down_proj", "ffn_down.weight"),
)
MOE = (
    TensorRule("mlp.gate.weight", "E, H", "router", "ffn_gate_inp.weight"),
    TensorRule("mlp.shared_expert.gate_proj.weight", "S, H", "gate_proj", "ffn_gate_shexp.weight"),
    TensorRule("mlp.shared_expert.up_proj.weight", "S, H", "up_proj", "ffn_up_shexp.weight"),
    TensorRule("mlp.shared_expert.down_proj.weight", "H, S", "down_proj", "ffn_down_shexp.weight"),
    TensorRule(
        "mlp.shared_expert_gate.weight", "1, H", "shared_expert_gate", "ffn_gate_inp_shexp.weight"
    ),
)
EXPERTS_SPLIT = (
    TensorRule("mlp.experts.{e}.gate_proj.weight", "F, H", "expert", "ffn_gate_exps.weight"),
    TensorRule("mlp.experts.{e}.up_proj.weight", "F, H", "expert", "ffn_up_exps.weight"),
    TensorRule("mlp.experts.{e}.down_proj.weight", "H, F", "expert", "ffn_down_exps.weight"),
)
EXPERTS_FUSED = (
    TensorRule(
        "mlp.experts.gate_up_proj", "E, 2*F, H", "experts_gate_up", "ffn_gate_up_exps.weight"
    ),
    TensorRule("mlp.experts.down_proj", "E, H, F", "experts_down", "ffn_down_exps.weight"),
)
# MLX stacks the experts of a layer but keeps gate and up apart.
EXPERTS_MLX = (
    TensorRule(
        "mlp.switch_mlp.gate_proj.weight", "E, F, H", "experts_gate", "ffn_gate_exps.weight"
    ),
    TensorRule("mlp.switch_mlp.up_proj.weight", "E, F, H", "experts_up", "ffn_up_exps.weight"),
    TensorRule(
        "mlp.switch_mlp.down_proj.weight", "E, H, F", "experts_down", "ffn_down_exps.weight"
    ),
)
MTP = (
    TensorRule("mtp.fc.weight", "H, 2*H", "mtp_fc", "nextn.eh_proj.weight"),
    TensorRule("mtp.pre_fc_norm_embedding.weight", "H", "norm", "nextn.enorm.weight"),
    TensorRule("mtp.pre_fc_norm_hidden.weight", "H", "norm", "nextn.hnorm.weight"),
    TensorRule("mtp.norm.weight", "H", "norm", "nextn.shared_head_norm.weight"),
)
VISION = (
    TensorRule("visual.patch_embed.proj.weight", "vH, vC, vT, vP, vP", "vision"),
    TensorRule("visual.patch_embed.proj.bias", "vH", "vision"),
    TensorRule("visual.pos_embed.weight", "vN, vH", "vision"),
    TensorRule("visual.merger.norm.weight", "vH", "vision"),
    TensorRule("visual.merger.norm.bias", "vH", "vision"),
    TensorRule("visual.merger.linear_fc1.weight", "vH*vM*vM, vH*vM*vM", "vision"),
    TensorRule("visual.merger.linear_fc1.bias", "vH*vM*vM", "vision"),
    TensorRule("visual.merger.linear_fc2.weight", "vO, vH*vM*vM", "vision"),
    TensorRule("visual.merger.linear_fc2.bias", "vO", "vision"),
)
VISION_BLOCK = (
    TensorRule("visual.blocks.{i}.norm1.weight", "vH", "vision"),
    TensorRule("visual.blocks.{i}.norm1.bias", "vH", "vision"),
    TensorRule("visual.blocks.{i}.norm2.weight", "vH", "vision"),
    TensorRule("visual.blocks.{i}.norm2.bias", "vH", "vision"),
    TensorRule("visual.blocks.{i}.attn.qkv.weight", "3*vH, vH", "vision"),
    TensorRule("visual.blocks.{i}.attn.qkv.bias", "3*vH", "vision"),
    TensorRule("visual.blocks.{i}.attn.proj.weight", "vH, vH", "vision"),
    TensorRule("visual.blocks.{i}.attn.proj.bias", "vH", "vision"),
    TensorRule("visual.blocks.{i}.mlp.linear_fc1.weight", "vI, vH", "vision"),
    TensorRule("visual.blocks.{i}.mlp.linear_fc1.bias", "vI", "vision"),
    TensorRule("visual.blocks.{i}.mlp.linear_fc2.weight", "vH, vI", "vision"),
    TensorRule("visual.blocks.{i}.mlp.linear_fc2.bias", "vH", "vision"),
)

LAYER_PREFIXES = ("layers.{i}.", "mtp.layers.{i}.")
_INDEX = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")  # a whole segment


@lru_cache(maxsize=1 << 16)  # each name of a checkpoint is asked for several times
def template(name: str) -> tuple[str, tuple[int, ...]]:
    """Split a name into its table key (`#` for each number) and the numbers.

    A name the table cannot have written (`layers.03`, `layers.#`) gets a key it does not hold.

    >>> template("layers.3.mlp.experts.17.up_proj.weight")
    ('layers.#.mlp.experts.#.up_proj.weight', (3, 17))
    """
    numbers = tuple(map(int, _INDEX.findall(name)))
    return _INDEX.sub("#", name.replace("#", "##")), numbers


def _keys() -> Iterator[tuple[str, TensorRule]]:
    layer: tuple[TensorRule, ...] = (
        *LAYER_NORMS,
        *GDN_IN,
        *GDN_IN_NEXT,
        *GDN,
        *ATTENTION,
        *MLP,
        *MOE,
    )
    layer += (*EXPERTS_SPLIT, *EXPERTS_FUSED, *EXPERTS_MLX)
    for prefix in LAYER_PREFIXES:
        for rule in layer:
            yield prefix + rule.hub, replace(rule, hub=prefix + rule.hub)
    for rule in (*TOP, *HEAD, *MTP, *VISION, *VISION_BLOCK):
        yield rule.hub, rule


# Table key -> rule, for every name any layout of the family can hold.
RULES = {key.replace("{i}", "#").replace("{e}", "#"): rule for key, rule in _keys()}
