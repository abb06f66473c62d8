"""Small checkpoints for tests, made from the family table with seeded values.

The geometry is asymmetric on purpose: three value heads per key head, unequal key and value widths,
so that a wrong axis, offset or order has another shape or another value. `blocky` sizes are
multiples of 128, so FP8 applies; `ragged` ones are not.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from formats.family.config import read_config
from formats.family.names import HUB, place
from formats.family.slots import Form, Slot, family

Weights = dict[str, torch.Tensor]

SIZES: dict[str, dict[str, int]] = {
    "ragged": {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "vocab_size": 300,
        "intermediate_size": 160,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "blocky": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
        "vocab_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
MOE_ONLY = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def sections(head_dim: Any) -> list[int]:
    """Return three parts of the frequencies of a quarter of a head; of any if it has no width."""
    pairs = head_dim // 8 if isinstance(head_dim, int) else 4
    return [pairs - pairs // 3 * 2, pairs // 3, pairs // 3]


def text_config(*, moe: bool = False, sizes: str = "blocky", **changes: Any) -> dict[str, Any]:
    """Return a flat text config."""
    gone = ("intermediate_size",) if moe else MOE_ONLY
    text: dict[str, Any] = {k: v for k, v in SIZES[sizes].items() if k not in gone}
    text |= {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": sections(changes.get("head_dim", SIZES[sizes]["head_dim"])),
        },
    }
    return text | changes


def hub_config(*, moe: bool = False, sizes: str = "blocky", **changes: Any) -> dict[str, Any]:
    """Return a nested vision-language config."""
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    name = "Qwen3_5Moe" if moe else "Qwen3_5"
    text = text_config(moe=moe, sizes=sizes, **changes)
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "vision_config": {
            "model_type": kind,
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [],
        },
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 250,
        "video_token_id": 251,
        "vision_start_token_id": 252,
        "vision_end_token_id": 253,
    }


def random_value(slot: Slot, generator: torch.Generator) -> torch.Tensor:
    """Return values a trained model could have; A_log and the delta rule's norm are F32."""
    shape, role = slot.shape, slot.rule.role
    noise = torch.randn(shape, generator=generator)
    if role == "A_log":
        return noise.abs() + 0.1
    if role == "gdn_norm":
        return 1 + 0.1 * noise
    scale = {"norm": 0.1, "dt_bias": 1.0, "conv1d": 0.3}.get(role, 0.02)
    return (noise * scale).to(torch.bfloat16)


def make_weights(
    config: dict[str, Any], form: Form | None = None, *, namespace: str = HUB, seed: int = 35
) -> Weights:
    """Return every tensor of a checkpoint of this config, under its stored name."""
    values = _drawn(json.dumps(config), form, seed)
    return {place(hub, namespace): value.clone() for hub, value in values.items()}


@lru_cache(maxsize=32)
def _drawn(config: str, form: Form | None, seed: int) -> Weights:
    """Return values by the hub's names; most tests have one of a few configs."""
    resolved = read_config(json.loads(config))
    form = form or Form(vision=resolved.vision is not None)
    generator = torch.Generator().manual_seed(seed)
    slots = family(resolved.sizes, resolved.layer_types, form)
    return {slot.hub: random_value(slot, generator) for slot in slots}


def split_experts(weights: Weights) -> Weights:
    """Return the same model with one tensor per expert and projection."""
    result: Weights = {}
    for name, value in weights.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                result[f"{base}{e}.gate_proj.weight"] = gate
                result[f"{base}{e}.up_proj.weight"] = up
        elif name.endswith("mlp.experts.down_proj"):
            base = name.removesuffix("down_proj")
            for e, down in enumerate(value):
                result[f"{base}{e}.down_proj.weight"] = down
        else:
            result[name] = value
    return result


def write_checkpoint(
    folder: Path, config: dict[str, Any], weights: Weights, *, shards: int = 1
) -> Path:
    """Write a checkpoint folder, with an index when there is more than one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}, "merges": []}}\n')
    names = sorted(weights)
    packs = [names[i::shards] for i in range(shards)]
    where = {}
    for i, pack in enumerate(packs, 1):
        file = "model.safetensors" if shards == 1 else f"model-{i:05d}-of-{shards:05d}.safetensors"
        where |= dict.fromkeys(pack, file)
        tensors = {name: weights[name].contiguous().clone() for name in pack}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards > 1:
        total = sum(t.numel() * t.element_size() for t in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def dense(folder: Path, **options: Any) -> Path:
    """Write a dense vision-language checkpoint."""
    config = hub_config(**options)
    return write_checkpoint(folder, config, make_weights(config))


def moe(folder: Path, **options: Any) -> Path:
    """Write a mixture of experts with fused experts."""
    config = hub_config(moe=True, **options)
    return write_checkpoint(folder, config, make_weights(config))
