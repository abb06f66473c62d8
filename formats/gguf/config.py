"""The config.json that says what the metadata of a GGUF file say.

Source: llama.cpp's `src/llama-model.cpp`, `src/models/qwen35.cpp` at b11434. Traps: block_count
counts the MTP layers; a float is stored in 32 bits, so 1e-6 comes back as its shortest decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.errors import FormatError
from formats.family.config_fields import FIELD_NAMES, LAYER_TYPES, MAX_EXPERTS, interval_types
from formats.gguf.header import Kv
from formats.gguf.keys import Keys, shown
from formats.gguf.pooling import KEY as POOLING
from formats.gguf.rope import rope_parameters
from formats.nearest import one_of
from formats.tensor import TensorInfo

# architecture: class, model_type, whether it is a mixture of experts
CLASSES = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", False),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", True),
}
# A key under the architecture's prefix, and the field of config.json that it is.
FIELDS = (
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
)
DENSE_FIELDS = (("feed_forward_length", "intermediate_size"),)
MOE_FIELDS = (
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)
# A tensor of a block that only layers of this kind have.
TYPE_SHOWN = dict(zip(LAYER_TYPES, ("ssm_a", "attn_q.weight"), strict=True))
# (whole, part): keys of which the one must be a multiple of the other
MULTIPLES = (
    ("attention.head_count", "attention.head_count_kv"),
    ("ssm.time_step_rank", "ssm.group_count"),
    ("ssm.inner_size", "ssm.time_step_rank"),
)
# What no GGUF file says, because the family has no choice about it.
FAMILY: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "dtype": "bfloat16", "hidden_act": "silu", "initializer_range": 0.02,
    "mamba_ssm_dtype": "float32", "mtp_use_dedicated_embeddings": False, "use_cache": True,
}  # fmt: skip
TOWER = "clip"  # what llama.cpp calls the architecture of every mmproj file
MOE_FAMILY: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}


def config_from_metadata(kv: Mapping[str, Kv], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the config.json of the text-only class that has this metadata and these tensors.

    Vocabulary and tied embeddings are read from the tensors. What GGUF cannot say has the family's
    value. FormatError names the key that is missing, or that disagrees with another.
    """
    arch = _architecture(kv)
    name, model_type, moe = CLASSES[arch]
    keys = Keys(kv, arch)
    if "output.weight" not in infos and POOLING in keys and keys.size(POOLING, least=0):
        name = name.replace("ForCausalLM", "TextModel")
    _check_keys(keys)
    if moe:
        _check_experts(keys)
    types = _layer_types(keys, infos)
    result: dict[str, Any] = {"architectures": [name], "model_type": model_type} | FAMILY
    result |= MOE_FAMILY if moe else {}
    result |= {f: keys.size(key) for key, f in (*FIELDS, *(MOE_FIELDS if moe else DENSE_FIELDS))}
    result |= {
        "vocab_size": _vocabulary(keys, infos),
        "tie_word_embeddings": "output.weight" not in infos,
        "num_hidden_layers": len(types),
        "mtp_num_hidden_layers": _mtp_layers(keys),
        "layer_types": types,
        "linear_value_head_dim": keys.size("ssm.inner_size") // keys.size("ssm.time_step_rank"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(keys),
    }
    return result | _end(kv)


def _architecture(kv: Mapping[str, Kv]) -> str:
    """Return a key of `CLASSES`. FormatError for a vision tower, or another family."""
    arch = kv["general.architecture"].value if "general.architecture" in kv else None
    if arch == TOWER:
        raise FormatError(
            "general.architecture is 'clip': a vision tower, expected a language model\n"
            "  fix   give the GGUF file that this mmproj file lies beside"
        )
    if not isinstance(arch, str) or arch not in CLASSES:
        raise FormatError(
            f"general.architecture is {'missing' if arch is None else shown(arch)}, "
            f"expected {one_of(CLASSES)}\n"
            "  why   qwen35 converts the Qwen3.5 family only"
        )
    return arch


def _end(kv: Mapping[str, Kv]) -> dict[str, int]:
    """Return the id of the token that ends a text, if the tokenizer has one."""
    end = kv.get("tokenizer.ggml.eos_token_id")
    if end is None:
        return {}
    if type(end.value) is not int:
        raise FormatError(f"{end.key} is {shown(end.value)} ({end.kind}), expected an integer")
    return {"eos_token_id": end.value}


def places_of(arch: str) -> dict[str, str]:
    """Return where each size of the family is read in a file of this architecture, by symbol."""
    keys = {field: key for key, field in (*FIELDS, *DENSE_FIELDS, *MOE_FIELDS)}
    sizes = {s: f"{arch}.{keys[field]}" for s, field in FIELD_NAMES.items() if field in keys}
    return sizes | {
        "V": "rows of token_embd.weight",
        "DV": f"{arch}.ssm.inner_size / time_step_rank",
        "L": f"{arch}.block_count less {arch}.nextn_predict_layers",
        "kinds": f"{arch}.attention.recurrent_layers",
    }


def _mtp_layers(keys: Keys) -> int:
    """Return how many of the blocks are MTP layers, at the end."""
    key = "nextn_predict_layers"
    return keys.size(key, least=0, most=keys.blocks - 1) if key in keys else 0


def _layer_types(keys: Keys, infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the kind of each layer, MTP layers not among them; without a key, as tensors show."""
    layers, key = keys.blocks - _mtp_layers(keys), "attention.recurrent_layers"
    if key not in keys and "full_attention_interval" not in keys:
        return [_shown_type(keys, infos, i) for i in range(layers)]
    if key not in keys:
        interval = keys.size("full_attention_interval")
        return list(interval_types(interval, layers))
    flags = keys.pair(key).value
    if not isinstance(flags, list) or len(flags) != keys.blocks or set(flags) - {0, 1}:
        keys.fail(key, f"is {shown(flags)}, expected {keys.blocks} booleans (block_count)")
    if any(flags[layers:]):
        keys.fail(key, f"has an MTP layer among them, expected none from block {layers} on")
    return [LAYER_TYPES[not flag] for flag in flags[:layers]]


def _shown_type(keys: Keys, infos: Mapping[str, TensorInfo], block: int) -> str:
    """Return the kind of a layer by a tensor that only this kind has."""
    kinds = [kind for kind, name in TYPE_SHOWN.items() if f"blk.{block}.{name}" in infos]
    if len(kinds) != 1:
        names = one_of(TYPE_SHOWN.values())
        keys.fail("full_attention_interval", f"is missing, and blk.{block} does not have {names}")
    return kinds[0]


def _check_keys(keys: Keys) -> None:
    """Refuse keys that contradict each other."""
    for whole, part in MULTIPLES:
        all_of_it, of = keys.size(whole), keys.size(part)
        if all_of_it % of:
            keys.fail(whole, f"is {all_of_it}, expected a multiple of {part} {of}")
    key, value = keys.size("attention.key_length"), keys.size("attention.value_length")
    if value != key:
        expected = f"key_length {key} ({keys.arch}.attention.key_length)"
        keys.fail("attention.value_length", f"is {value}, expected {expected}")


def _check_experts(keys: Keys) -> None:
    used, count = keys.size("expert_used_count"), keys.size("expert_count")
    if used > count:
        keys.fail("expert_used_count", f"is {used}, expected at most expert_count {count}")
    most = MAX_EXPERTS // keys.blocks
    if count > most:
        keys.fail("expert_count", f"is {count}, expected at most {most} in {keys.blocks} blocks")


def _vocabulary(keys: Keys, infos: Mapping[str, TensorInfo]) -> int:
    """Return the rows of the embeddings, which must be as wide as the key says."""
    width, info = keys.size("embedding_length"), infos.get("token_embd.weight")
    if info is None:
        raise FormatError("token_embd.weight is missing: its rows are the vocabulary")
    if len(info.shape) != 2 or info.shape[1] != width:
        raise FormatError(
            f"token_embd.weight has shape {list(info.shape)}, expected [vocabulary, {width}] "
            f"({keys.arch}.embedding_length)"
        )
    if "vocab_size" in keys and keys.size("vocab_size") != info.shape[0]:
        vocabulary = keys.size("vocab_size")
        keys.fail("vocab_size", f"is {vocabulary}, expected {info.shape[0]} (token_embd.weight)")
    return info.shape[0]
