"""The same model as other tools store it: MLX, Qwen3-Next, FP8 blocks. Written by hand, not by ops.

Each function takes clean hub weights (`tests/checkpoints.py`) and returns what that tool writes, so
that reading it back can be compared value by value.
"""

from __future__ import annotations

from typing import Any

import torch

from formats.config import read_config
from formats.layout import Layout, recognise
from formats.names import normalise
from formats.qwen35 import RULES, template
from formats.safetensors_file import TORCH_NAMES
from formats.tensor import TensorInfo
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
    return recognise(infos_of(weights), read_config(config))


def without(weights: Weights, *starts: str) -> Weights:
    """Return the tensors whose names start otherwise."""
    return {name: value for name, value in weights.items() if not name.startswith(starts)}


def shiftable(weights: Weights) -> Weights:
    """Round the zero-centred norms to multiples of 2^-7 (no -0): 1 + w is exact in BF16."""
    return {
        name: ((w.float() * 128).round() / 128 + 0.0).clamp(-0.5, 0.5).to(w.dtype)
        if role_of(name) == "norm" else w
        for name, w in weights.items()
    }  # fmt: skip


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
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv",
    "in_proj_z", "out_proj", "expert", "experts_gate_up", "experts_down",
)  # fmt: skip


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
