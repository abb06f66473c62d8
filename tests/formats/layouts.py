"""The same model as other tools store it: MLX, Qwen3-Next, FP8 blocks. Written by hand, not by ops.

Each function takes clean hub weights (`tests/checkpoints.py`) and returns what that tool writes, so
that reading it back can be compared value by value.
"""

from __future__ import annotations

from typing import Any

import torch

from formats.family.config import read_config
from formats.family.layout import Layout
from formats.family.names import normalise
from formats.family.recognise import recognise
from formats.family.rules import RULES, template
from formats.safetensors.file import TORCH_NAMES
from formats.tensor import TensorInfo
from quant.registry import RECOGNISERS
from tests.checkpoints import Weights, split_experts

Config = dict[str, Any]
P = "model.language_model."
Q = P + "layers.3.self_attn.q_proj.weight"


def role_of(name: str) -> str:
    """Return the role of a stored tensor by its name."""
    return RULES[template(normalise(name))[0]].role


def infos_of(weights: Weights) -> dict[str, TensorInfo]:
    """Return what a header would say of these tensors."""
    names = {getattr(torch, ours): dtype for dtype, ours in TORCH_NAMES.items()}
    return {n: TensorInfo(n, names[t.dtype], tuple(t.shape)) for n, t in weights.items()}


def recognised(config: Config, weights: Weights) -> Layout:
    """Return what these tensors are said to be."""
    return recognise(infos_of(weights), read_config(config), RECOGNISERS)


def without(weights: Weights, *starts: str) -> Weights:
    """Return the tensors whose names start otherwise."""
    return {name: value for name, value in weights.items() if not name.startswith(starts)}


def shiftable(weights: Weights) -> Weights:
    """Round the zero-centred norms to multiples of 2^-7 (no -0): 1 + w is exact in BF16."""
    return {
        name: ((w.float() * 128).round() / 128 + 0.0).clamp(-0.5, 0.5).to(w.dtype)
        if role_of(name) == "norm"
        else w
        for name, w in weights.items()
    }


def to_mlx(weights: Weights) -> Weights:
    """Return hub weights as MLX stores them: 1 + w, conv axes moved, stacked experts, no MTP."""
    result: Weights = {}
    for name, value in weights.items():
        if name.startswith("mtp."):
            continue
        text = "language_model." if name == "lm_head.weight" else ""
        ours = text + name.replace("model.language_model.", "language_model.model.").replace(
            "model.visual.", "vision_tower."
        )
        role = role_of(name)
        if role == "experts_gate_up":
            base = ours.removesuffix("experts.gate_up_proj") + "switch_mlp."
            result[base + "gate_proj.weight"], result[base + "up_proj.weight"] = value.chunk(2, 1)
        elif role == "experts_down":
            base = ours.removesuffix("experts.down_proj") + "switch_mlp."
            result[base + "down_proj.weight"] = value
        elif role == "norm":
            result[ours] = (1 + value.float()).to(value.dtype)
        elif role == "conv1d":
            result[ours] = value.transpose(1, 2)
        else:
            result[ours] = value.permute(0, 2, 3, 4, 1) if value.dim() == 5 else value
    return result


def to_next(weights: Weights, config: dict[str, Any]) -> Weights:
    """Return text weights as Qwen3-Next stores them: the delta rule's inputs fused by key head."""
    text = config.get("text_config", config)
    heads = text["linear_num_key_heads"]
    ratio = text["linear_num_value_heads"] // heads
    k, v = text["linear_key_head_dim"], ratio * text["linear_value_head_dim"]
    result = dict(weights)
    for name in weights:
        if not name.endswith("in_proj_qkv.weight"):
            continue
        base = name.removesuffix("qkv.weight")
        qkv, z, b, a = (result.pop(f"{base}{part}.weight") for part in ("qkv", "z", "b", "a"))
        keys, values = qkv[heads * k :], qkv[2 * heads * k :]
        rows = []
        for h in range(heads):
            rows += [qkv[h * k : (h + 1) * k], keys[h * k : (h + 1) * k]]
            rows += [values[h * v : (h + 1) * v], z[h * v : (h + 1) * v]]
        result[base + "qkvz.weight"] = torch.cat(rows)
        own = [slice(h * ratio, (h + 1) * ratio) for h in range(heads)]
        result[base + "ba.weight"] = torch.cat([part[s] for s in own for part in (b, a)])
    return split_experts(result)


FP8_ROLES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "expert",
    "experts_gate_up",
    "experts_down",
)


def to_fp8(weights: Weights) -> Weights:
    """Return the weights with 128x128 FP8 blocks and BF16 scales, like the official releases."""
    result: Weights = {}
    for name, value in weights.items():
        if role_of(name) not in FP8_ROLES:
            result[name] = value
            continue
        scale = torch.zeros(*value.shape[:-2], *(-(-n // 128) for n in value.shape[-2:]))
        codes = torch.zeros(value.shape)
        for r in range(scale.shape[-2]):
            for c in range(scale.shape[-1]):
                block = (..., slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
                amax = value[block].float().abs().amax((-2, -1), keepdim=True)
                own = (amax / 448).to(torch.bfloat16).float()
                codes[block] = (value[block].float() / own).clamp(-448, 448)
                scale[..., r, c] = own[..., 0, 0]
        result[name] = codes.to(torch.float8_e4m3fn)
        result[name + "_scale_inv"] = scale.to(torch.bfloat16)
    return result


GGUF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
GGUF_TOP = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "mtp.fc.weight": "blk.4.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.4.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.4.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.4.nextn.shared_head_norm.weight",
}  # fmt: skip


def tile_heads(value: torch.Tensor, keys: int, width: int, dim: int = 0) -> torch.Tensor:
    """Put value head g*r + j in place j*NK + g, head by head."""
    heads = value.split(width, dim)
    ratio = len(heads) // keys
    return torch.cat([heads[g * ratio + j] for j in range(ratio) for g in range(keys)], dim)


def gguf_value(role: str, value: torch.Tensor, text: Config) -> torch.Tensor:
    """Return a tensor of this role as llama.cpp computes with it, in float32."""
    keys, width = text["linear_num_key_heads"], text["linear_value_head_dim"]
    fixed, wide = 2 * keys * text["linear_key_head_dim"], value.float()
    if role in ("in_proj_qkv", "conv1d"):
        wide = torch.cat([wide[:fixed], tile_heads(wide[fixed:], keys, width)])
        return wide[:, 0] if role == "conv1d" else wide
    if role in ("in_proj_z", "out_proj"):
        return tile_heads(wide, keys, width, int(role == "out_proj"))
    if role in ("in_proj_a", "in_proj_b", "dt_bias", "A_log"):
        wide = tile_heads(wide, keys, 1)
        return -wide.exp() if role == "A_log" else wide
    return wide + 1 if role == "norm" else wide


def to_gguf(weights: Weights, text: Config) -> Weights:
    """Return the text model as llama.cpp's converter writes it at F32, four layers deep."""
    result: Weights = {}
    for name, value in weights.items():
        hub = normalise(name)
        if hub.startswith("visual."):
            continue
        wide = gguf_value(role_of(name), value, text)
        if hub in GGUF_TOP:
            result[GGUF_TOP[hub]] = wide
            continue
        layer, rest = hub.removeprefix("mtp.").removeprefix("layers.").split(".", 1)
        block = f"blk.{4 + int(layer) if hub.startswith('mtp.') else layer}."
        if role_of(name) == "experts_gate_up":
            gate, up = wide.chunk(2, 1)
            result |= {block + "ffn_gate_exps.weight": gate, block + "ffn_up_exps.weight": up}
        else:
            result[block + GGUF_LAYER[rest]] = wide
    return result
