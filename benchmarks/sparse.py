"""Checkpoints of any size that take no disk: real headers, the data a hole of zeros.

Made from the family table, so that names, shapes and order are those of the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.family.config import read_config
from formats.family.names import HUB, place
from formats.family.slots import Form, family
from formats.safetensors.header import build_header
from formats.tensor import DTYPE_BYTES, TensorInfo

FLOAT32 = ("A_log", "gdn_norm")  # of the Qwen3.5 releases; all the rest is bfloat16
COMMON = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000,
                        "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                        "mrope_section": [11, 11, 10]},
}  # fmt: skip
VISION = {
    "model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "num_heads": 16, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
A17B = COMMON | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
A3B = COMMON | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
D27B = COMMON | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "intermediate_size": 17408,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, how its hub files are laid out, and what was published of them.

    Source: the repositories' config.json, index and file lists.
    """

    text: Mapping[str, Any]
    shards: int = 1
    tensors: int = 0
    nbytes: int = 0
    form: Form = field(default_factory=lambda: Form(vision=False, mtp_layers=0))
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)


HUB_FORM = Form(experts="fused", mtp_experts="split", mtp_layers=1, vision=True, head=True)
SHAPES = {
    "397B-A17B": Shape(A17B, 94, 2924, 806_795_875_168, HUB_FORM),
    "27B": Shape(D27B, 11, 1199, 55_562_872_800, HUB_FORM),
    "35B-A3B": Shape(A3B, 14, 1811, 71_903_655_008, HUB_FORM),
}


def write_sparse(folder: Path, shape: Shape) -> list[TensorInfo]:
    """Write config, index and shards of a shape; return its tensors."""
    folder.mkdir()
    config = config_of(shape)
    (folder / "config.json").write_text(json.dumps(config))
    resolved = read_config(config)
    infos = [
        TensorInfo(place(slot.hub, HUB), "F32" if slot.rule.role in FLOAT32 else "BF16", slot.shape)
        for slot in family(resolved.sizes, resolved.layer_types, shape.form)
    ]
    packs = spread(infos, shape.shards)
    where: dict[str, str] = {}
    for index, pack in enumerate(packs, 1):
        name = f"model-{index:05d}-of-{len(packs):05d}.safetensors"
        write_holes(folder / name, pack)
        where |= {info.name: name for info in pack}
    total = sum(info.nbytes for info in infos)
    listing = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    return infos


def config_of(shape: Shape) -> dict[str, Any]:
    """Return config.json, nested if there is a vision tower."""
    kind = shape.text["model_type"].removesuffix("_text")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    if not shape.form.vision:
        return {"architectures": [f"{name}ForCausalLM"], **shape.text}
    vision = {**shape.vision, "out_hidden_size": shape.text["hidden_size"], "model_type": kind}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": dict(shape.text),
        "vision_config": vision,
        "tie_word_embeddings": shape.text.get("tie_word_embeddings", False),
    }


def spread(infos: Sequence[TensorInfo], count: int) -> list[list[TensorInfo]]:
    """Part tensors in order among `count` files of about one size."""
    total = sum(info.nbytes for info in infos)
    packs: list[list[TensorInfo]] = [[] for _ in range(count)]
    before = 0
    for info in infos:
        packs[min(count - 1, before * count // total)].append(info)
        before += info.nbytes
    return [pack for pack in packs if pack]


def write_holes(path: Path, infos: Sequence[TensorInfo]) -> dict[str, int]:
    """Write one safetensors file; return the byte at which each tensor begins."""
    ordered = sorted(infos, key=lambda info: -DTYPE_BYTES[info.dtype])
    header, offsets = build_header(ordered, {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(info.nbytes for info in ordered))
    return {info.name: offset for info, offset in zip(ordered, offsets, strict=True)}
