"""What a GGUF file says of a Qwen3.5 text model.

Keys, kinds and their order are those of llama.cpp's converter, with both `recurrent_layers` (newer
readers) and `full_attention_interval` (older ones). Keys of the tokenizer are not here.

Source: llama.cpp's `conversion/base.py`, `conversion/qwen.py`, `src/models/qwen35.cpp` at b11434.
Traps: block_count counts the MTP layers; llama.cpp has one state size for keys and values of the
delta rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from formats.errors import FormatError
from formats.family.config import Config
from formats.family.config_fields import DEFAULT_INTERVAL, LAYER_TYPES, MAX_SIZE, interval_types
from formats.gguf.header import Kv
from formats.gguf.pooling import KEY as POOLING
from formats.gguf.rope import SECTIONS, dimensions, scaling_rows, sections
from formats.tensor import TensorInfo

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
CONTEXT = 32768  # of transformers' class
QUANTIZATION_VERSION = 2


def text_metadata(
    config: Config,
    *,
    about: Mapping[str, str | Sequence[str]],
    file_type: int,
    mtp_layers: int,
    generation: Mapping[str, Any] | None = None,
    pooling: int | None = None,
) -> list[Kv]:
    """Return every pair of a text model's file but the tokenizer's, in llama.cpp's order.

    about       "name", "size_label", "license", "tags" ...: what is under `general.`
    file_type   llama.cpp's number of the mix, such as 15 for Q4_K_M
    mtp_layers  that are written, whatever the config says
    generation  generation_config.json
    pooling     llama.cpp's number of what an embedding model makes of its hidden states

    FormatError if llama.cpp has no key for what the config or `generation` says.
    """
    arch = "qwen35moe" if config.moe else "qwen35"
    return [
        Kv("general.architecture", "string", arch),
        Kv("general.type", "string", "model"),
        *sampling_pairs(generation or {}),
        *_about(about),
        *_model(config, arch, file_type, mtp_layers),
        *([] if pooling is None else [Kv(f"{arch}.{POOLING}", "uint32", pooling)]),
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
        *scaling_rows(config),
        ("rope.dimension_sections", "array[int32]", sections(config)),
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
        ("rope.dimension_count", "uint32", dimensions(config)),
        ("rope.dimension_sections", "array[int32]", None if rope.sections else SECTIONS),
    )
    for key, kind, value in rows:
        if value is not None:
            yield Kv(key if key == "general.file_type" else f"{arch}.{key}", kind, value)


def _check_state(config: Config) -> None:
    s, fields = config.sizes, config.fields
    if s["DK"] != s["DV"]:
        raise FormatError(
            f"{config.origin}: {fields['DV']} is {s['DV']}, expected {fields['DK']} {s['DK']}\n"
            "  why   llama.cpp has one state size for keys and values of the delta rule"
        )
    if s["DV"] * s["NV"] >= 1 << 32:
        raise FormatError(
            f"{config.origin}: {fields['DV']} {s['DV']} x {fields['NV']} {s['NV']} "
            "does not fit uint32"
        )


def _context(config: Config) -> int:
    value = config.text.get("max_position_embeddings")
    value = CONTEXT if value is None else value
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise FormatError(
            f"config.json: max_position_embeddings is {value!r}, "
            f"expected an integer from 1 to {MAX_SIZE}"
        )
    return value


def _interval(config: Config) -> int:
    """Return what gives these layer types: as declared, or the smallest; else as declared, or 4.

    Where none does, only readers that know `recurrent_layers` see the layers as they are.
    """
    declared = config.text.get("full_attention_interval")
    declared = declared if type(declared) is int and 0 < declared < 1 << 31 else DEFAULT_INTERVAL
    types = config.layer_types
    intervals = (declared, *range(1, len(types) + 2))
    return next((n for n in intervals if interval_types(n, len(types)) == types), declared)
