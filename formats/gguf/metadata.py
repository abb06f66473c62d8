"""What a GGUF file says of a Qwen3.5 text model, and the config.json that says the same.

Keys, kinds and their order are those of llama.cpp's converter, with both `recurrent_layers` (newer
readers) and `full_attention_interval` (older ones). Keys of the tokenizer are not here.

Source: llama.cpp's `conversion/base.py`, `conversion/qwen.py`, `src/models/qwen35.cpp` at b11434.
Traps: block_count counts the MTP layers; llama.cpp has one state size for keys and values of the
delta rule; a float is stored in 32 bits, so 1e-6 comes back as its shortest decimal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import nextafter
from typing import Any

from formats.errors import FormatError
from formats.family.config import (
    DEFAULT_INTERVAL,
    LAYER_TYPES,
    MAX_SIZE,
    Config,
    interval_types,
)
from formats.gguf.header import Kv
from formats.gguf.keys import Keys, shown
from formats.tensor import TensorInfo

# architecture: class, model_type, whether it is a mixture of experts
CLASSES = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", False),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", True),
}
# Where the sampling parameters are in generation_config.json; the first name that is there counts.
SAMPLING = (
    ("sequence", "string", ("sequence",)),
    ("top_k", "int32", ("top_k",)),
    ("top_p", "float32", ("top_p",)),
    ("min_p", "float32", ("min_p",)),
    ("xtc_probability", "float32", ("xtc_probability",)),
    ("xtc_threshold", "float32", ("xtc_threshold",)),
    ("temp", "float32", ("temperature",)),
    ("penalty_last_n", "int32", ("penalty_last_n",)),
    ("penalty_repeat", "float32", ("penalty_repeat", "repetition_penalty")),
    ("mirostat", "int32", ("mirostat",)),
    ("mirostat_tau", "float32", ("mirostat_tau",)),
    ("mirostat_eta", "float32", ("mirostat_eta",)),
)
ABOUT = (
    "name",
    "author",
    "version",
    "organization",
    "finetune",
    "basename",
    "description",
    "quantized_by",
    "size_label",
    "license",
    "license.name",
    "license.link",
    "url",
    "doi",
    "uuid",
    "repo_url",
    "source.url",
    "source.doi",
    "source.uuid",
    "source.repo_url",
    "tags",
    "languages",
)
VERSION = re.compile(r"v\d+(\.\d+)*|\d.*")
SECTIONS = [11, 11, 10, 0]
CONTEXT = 32768  # of transformers' class
QUANTIZATION_VERSION = 2

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
MOE_FAMILY: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001}


def text_metadata(
    config: Config,
    *,
    about: Mapping[str, str | Sequence[str]],
    file_type: int,
    mtp_layers: int,
    generation: Mapping[str, Any] | None = None,
) -> list[Kv]:
    """Return every pair of a text model's file but the tokenizer's, in llama.cpp's order.

    about       "name", "size_label", "license", "tags" ...: what stands under `general.`
    file_type   llama.cpp's number of the mix, such as 15 for Q4_K_M
    mtp_layers  that are written, whatever the config says
    generation  generation_config.json

    FormatError if llama.cpp has no key for what the config or `generation` says.
    """
    arch = "qwen35moe" if config.moe else "qwen35"
    return [
        Kv("general.architecture", "string", arch),
        Kv("general.type", "string", "model"),
        *sampling_pairs(generation or {}),
        *_about(about),
        *_model(config, arch, file_type, mtp_layers),
        Kv("general.quantization_version", "uint32", QUANTIZATION_VERSION),
    ]


def title(name: str) -> str:
    """Return a model's name as llama.cpp writes it: words apart, each with a capital.

    >>> title("Qwen3.5-0.8B-instruct-v2")
    'Qwen3.5 0.8B Instruct v2'
    """
    words = name.replace("-", " ").split()
    return " ".join(
        word.title() if word.islower() and not VERSION.fullmatch(word) else word for word in words
    )


def size_label(infos: Iterable[TensorInfo]) -> str:
    """Return the model's size as llama.cpp rounds it: "873M", or "256x1.2B" with experts.

    `infos` have GGUF names; stacks of experts count once per expert, as "shared" does.
    """
    import gguf

    shared = one = total = 0
    counts = []
    for info in infos:
        total += info.numel
        if len(info.shape) == 3 and info.name.split(".")[-2].endswith("_exps"):
            counts.append(info.shape[0])
            one += info.numel // info.shape[0]
        else:
            shared += info.numel
    experts = sum(counts) // len(counts) if counts else 0
    return gguf.size_label(total, shared, one, experts)


def sampling_pairs(generation: Mapping[str, Any]) -> Iterable[Kv]:
    """Return how to sample, as far as generation_config.json says."""
    for key, kind, fields in SAMPLING:
        sampling = {f: generation[f] for f in fields if generation.get(f) is not None}
        for field, value in list(sampling.items())[:1]:
            if not _fits(kind, value):
                raise FormatError(
                    f"generation_config.json: {field} is {value!r}, expected {kind}, "
                    f"to be written as general.sampling.{key}"
                )
            if value != "":
                yield Kv(f"general.sampling.{key}", kind, value)


def _fits(kind: str, value: object) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == "int32":
        return isinstance(value, int) and -(1 << 31) <= value < 1 << 31
    return abs(value) < 3e38  # NaN is not


def _about(about: Mapping[str, str | Sequence[str]]) -> Iterable[Kv]:
    strange = sorted(set(about) - set(ABOUT))
    assert not strange, f"general.{strange[0]} is not a key of llama.cpp's"
    for key in ABOUT:
        value = about.get(key)
        if value:
            kind = "string" if isinstance(value, str) else "array[string]"
            yield Kv(f"general.{key}", kind, value if isinstance(value, str) else list(value))


def _model(config: Config, arch: str, file_type: int, mtp_layers: int) -> Iterable[Kv]:
    """Return the architecture's pairs; a row without a value is left out."""
    s, rope, layers = config.sizes, config.rope, len(config.layer_types)
    _check_state(config)
    recurrent = [kind == LAYER_TYPES[0] for kind in config.layer_types] + [False] * mtp_layers
    rows: tuple[tuple[str, str, Any], ...] = (
        ("block_count", "uint32", layers + mtp_layers),
        ("context_length", "uint32", _context(config)),
        ("embedding_length", "uint32", s["H"]),
        ("feed_forward_length", "uint32", s.get("I")),
        ("attention.head_count", "uint32", s["NH"]),
        ("attention.head_count_kv", "uint32", s["NKV"]),
        ("rope.dimension_sections", "array[int32]", _sections(rope.sections)),
        ("rope.freq_base", "float32", rope.theta),
        ("attention.layer_norm_rms_epsilon", "float32", config.eps),
        ("expert_count", "uint32", s.get("E")),
        ("expert_used_count", "uint32", s.get("TOPK")),
        ("attention.key_length", "uint32", s["HD"]),
        ("attention.value_length", "uint32", s["HD"]),
        ("general.file_type", "uint32", file_type),
        ("expert_feed_forward_length", "uint32", s.get("F")),
        ("expert_shared_feed_forward_length", "uint32", s.get("S")),
        ("nextn_predict_layers", "uint32", mtp_layers or None),
        ("ssm.conv_kernel", "uint32", s["K"]),
        ("ssm.state_size", "uint32", s["DK"]),
        ("ssm.group_count", "uint32", s["NK"]),
        ("ssm.time_step_rank", "uint32", s["NV"]),
        ("ssm.inner_size", "uint32", s["DV"] * s["NV"]),
        ("attention.recurrent_layers", "array[bool]", recurrent),
        ("full_attention_interval", "uint32", _interval(config)),
        ("rope.dimension_count", "uint32", _turned(config)),
        ("rope.dimension_sections", "array[int32]", None if rope.sections else SECTIONS),
    )
    for key, kind, value in rows:
        if value is not None:
            yield Kv(key if key == "general.file_type" else f"{arch}.{key}", kind, value)


def _check_state(config: Config) -> None:
    s, fields = config.sizes, config.fields
    if s["DK"] != s["DV"]:
        raise FormatError(
            f"config.json: {fields['DV']} is {s['DV']}, expected {fields['DK']} {s['DK']}\n"
            "  why   llama.cpp has one state size for keys and values of the delta rule"
        )
    if s["DV"] * s["NV"] >= 1 << 32:
        raise FormatError(
            f"config.json: {fields['DV']} {s['DV']} x {fields['NV']} {s['NV']} does not fit uint32"
        )


def _turned(config: Config) -> int:
    """Return how many dimensions of a head are rotated: pairs, and at least one."""
    turned = int(config.sizes["HD"] * config.rope.partial)
    if turned < 2 or turned % 2:
        raise FormatError(
            f"config.json: partial_rotary_factor {config.rope.partial} of "
            f"{config.fields['HD']} {config.sizes['HD']} is {turned}, expected an even number"
        )
    return turned


def _context(config: Config) -> int:
    value = config.text.get("max_position_embeddings")
    value = CONTEXT if value is None else value
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise FormatError(
            f"config.json: max_position_embeddings is {value!r}, "
            f"expected an integer from 1 to {MAX_SIZE}"
        )
    return value


def _sections(sections: tuple[int, ...]) -> list[int] | None:
    if not sections:
        return None
    if len(sections) > 4 or max(sections) > MAX_SIZE or not any(sections):
        raise FormatError(f"config.json: mrope_section is {list(sections)}, expected 1 to 4 sizes")
    return [*sections, *[0] * (4 - len(sections))]


def _interval(config: Config) -> int:
    """Return what gives these layer types: as declared, or the smallest; else as declared, or 4.

    Where none does, only readers that know `recurrent_layers` see the layers as they are.
    """
    declared = config.text.get("full_attention_interval")
    declared = declared if type(declared) is int and 0 < declared < 1 << 31 else DEFAULT_INTERVAL
    types = config.layer_types
    intervals = (declared, *range(1, len(types) + 2))
    return next((n for n in intervals if interval_types(n, len(types)) == types), declared)


def config_from_metadata(kv: Mapping[str, Kv], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the config.json of the text-only class that has this metadata and these tensors.

    Vocabulary and tied embeddings are read from the tensors. What GGUF cannot say has the family's
    value. FormatError names the key that is missing, or that disagrees with another.
    """
    arch = kv["general.architecture"].value if "general.architecture" in kv else None
    if not isinstance(arch, str) or arch not in CLASSES:
        raise FormatError(
            f"general.architecture is {shown(arch)}, expected {' or '.join(CLASSES)}\n"
            "  why   qwen35 converts the Qwen3.5 family only"
        )
    name, model_type, moe = CLASSES[arch]
    keys = Keys(kv, arch)
    _check_keys(keys)
    if moe:
        _check_experts(keys)
    types = _layer_types(keys)
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
        "rope_parameters": _rope(keys),
    }
    end = kv.get("tokenizer.ggml.eos_token_id")
    if end is not None and type(end.value) is not int:
        raise FormatError(f"{end.key} is {shown(end.value)} ({end.kind}), expected an integer")
    return result if end is None else result | {"eos_token_id": end.value}


def _mtp_layers(keys: Keys) -> int:
    """Return how many of the blocks are MTP layers, at the end."""
    key = "nextn_predict_layers"
    return keys.size(key, least=0, most=keys.blocks - 1) if key in keys else 0


def _layer_types(keys: Keys) -> list[str]:
    """Return the kind of each layer, MTP layers not among them."""
    layers, key = keys.blocks - _mtp_layers(keys), "attention.recurrent_layers"
    if key not in keys:
        interval = keys.size("full_attention_interval")
        return list(interval_types(interval, layers))
    flags = keys.pair(key).value
    if not isinstance(flags, list) or len(flags) != keys.blocks or set(flags) - {0, 1}:
        keys.fail(key, f"is {shown(flags)}, expected {keys.blocks} booleans (block_count)")
    if any(flags[layers:]):
        keys.fail(key, f"has an MTP layer among them, expected none from block {layers} on")
    return [LAYER_TYPES[not flag] for flag in flags[:layers]]


def _rope(keys: Keys) -> dict[str, Any]:
    """Return `rope_parameters`."""
    width, turned = keys.size("attention.key_length"), keys.size("rope.dimension_count")
    if turned > width or turned % 2:
        keys.fail("rope.dimension_count", f"is {turned}, expected an even number up to {width}")
    key = "rope.dimension_sections"
    sections = keys.pair(key).value
    sizes = isinstance(sections, list) and all(type(s) is int and s >= 0 for s in sections)
    if not sizes or len(sections) != 4 or not any(sections):
        keys.fail(key, f"is {shown(sections)}, expected 4 sizes")
    theta, part = keys.real("rope.freq_base"), turned / width
    return {
        "rope_type": "default",
        "rope_theta": int(theta) if theta.is_integer() else theta,
        # the quotient can be rounded down, and would then lose a dimension
        "partial_rotary_factor": part if int(part * width) == turned else nextafter(part, 1),
        "mrope_section": sections if sections[3] else sections[:3],
        "mrope_interleaved": True,
    }


def _check_keys(keys: Keys) -> None:
    """Refuse keys that contradict each other, and rope scaling, which the family does not have."""
    for whole, part in MULTIPLES:
        all_of_it, of = keys.size(whole), keys.size(part)
        if all_of_it % of:
            keys.fail(whole, f"is {all_of_it}, expected a multiple of {part} {of}")
    key, value = keys.size("attention.key_length"), keys.size("attention.value_length")
    if value != key:
        keys.fail("attention.value_length", f"is {value}, expected key_length {key}")
    scaling = "rope.scaling.type"
    if scaling in keys and keys.pair(scaling).value != "none":
        keys.fail(scaling, f"is {keys.pair(scaling).value!r}, expected 'none'")


def _check_experts(keys: Keys) -> None:
    used, count = keys.size("expert_used_count"), keys.size("expert_count")
    if used > count:
        keys.fail("expert_used_count", f"is {used}, expected at most expert_count {count}")


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
