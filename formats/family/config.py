"""config.json, read: sizes by symbol, layer types, rope, tie flags; nothing is guessed.

Sizes are always read, never derived from each other (head_dim is 256 although 5120 / 24 is not).
A field that is absent or null takes transformers' default for its class, and says so when a shape
disagrees. `layer_types` wins over `full_attention_interval`. Source: transformers' configuration
classes `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`, `Qwen3NextConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.errors import FormatError
from formats.family.rope import Rope, read_rope, rope_problems
from formats.stored import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# symbol: (field, default of transformers' class; None: there is no sensible one)
Fields = dict[str, tuple[str, int | None]]
TEXT_FIELDS: Fields = {
    "V": ("vocab_size", None),
    "H": ("hidden_size", None),
    "NH": ("num_attention_heads", None),
    "NKV": ("num_key_value_heads", None),
    "HD": ("head_dim", 256),
    "NK": ("linear_num_key_heads", 16),
    "NV": ("linear_num_value_heads", 32),
    "DK": ("linear_key_head_dim", 128),
    "DV": ("linear_value_head_dim", 128),
    "K": ("linear_conv_kernel_dim", 4),
}
DENSE_FIELDS: Fields = {"I": ("intermediate_size", None)}
MOE_FIELDS: Fields = {
    "E": ("num_experts", None),
    "TOPK": ("num_experts_per_tok", None),
    "F": ("moe_intermediate_size", None),
    "S": ("shared_expert_intermediate_size", None),
}
VISION_FIELDS: Fields = {
    "vD": ("depth", None),
    "vH": ("hidden_size", None),
    "vI": ("intermediate_size", None),
    "vNH": ("num_heads", None),
    "vC": ("in_channels", 3),
    "vP": ("patch_size", 16),
    "vT": ("temporal_patch_size", 2),
    "vM": ("spatial_merge_size", 2),
    "vO": ("out_hidden_size", None),
    "vN": ("num_position_embeddings", 2304),
}

# symbol: name of the field in config.json, `text_config.` left out
FIELD_NAMES = {s: field for s, (field, _) in (TEXT_FIELDS | DENSE_FIELDS | MOE_FIELDS).items()} | {
    symbol: f"vision_config.{field}" for symbol, (field, _) in VISION_FIELDS.items()
}
ORIGIN = "config.json"

# model_type of the text part: is it a mixture of experts?
TEXT_TYPES = {"qwen3_5_text": False, "qwen3_5_moe_text": True, "qwen3_next": True}
OUTER_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ABSENT = " (absent, default)"  # follows a field in `Config.fields`
# Classes without a head; what is made of their hidden states, files beside the tensors say.
BASE_CLASSES = (
    "Qwen3_5TextModel", "Qwen3_5MoeTextModel", "Qwen3_5Model", "Qwen3_5MoeModel", "Qwen3NextModel",
)  # fmt: skip
LAYER_TYPES = ("linear_attention", "full_attention")
DEFAULT_INTERVAL = 4
MAX_SIZE = (1 << 31) - 1
# Bounds on how many tensors a config can promise: the largest release has 92 layers x 512 experts.
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 18

# (whole, part): fields of which the one must be a multiple of the other
MULTIPLES = (("NH", "NKV"), ("NV", "NK"), ("vH", "vNH"))

# What the architecture has hard-wired: (field, accepted values, what it means otherwise)
HARD_WIRED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attn_output_gate", (True,), "attention without an output gate"),
    ("output_gate_type", ("silu", "swish"), "another gate in the delta rule (qwen4_exp)"),
    ("hidden_act", ("silu",), "another activation"),
    ("attention_bias", (False,), "biased attention"),
    ("norm_topk_prob", (True,), "router weights that are not renormalised"),
    ("decoder_sparse_step", (1,), "dense layers between the sparse ones"),
    ("mlp_only_layers", ([],), "dense layers between the sparse ones"),
)

# What transformers takes out of a config for how to generate (`GenerationConfig`), where
# generation_config.json is absent.
GENERATION_FIELDS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "stop_strings", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size", "num_beams",
    "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping",
    "num_return_sequences", "guidance_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """What config.json says, resolved.

    `sizes` maps the symbols of the family table to numbers, `fields` to where each was read, "L"
    to where the layers were counted, "kinds" to where their kinds are. The fields are `origin`'s.
    `problems` is what no engine reads as another does.
    """

    raw: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any] | None
    sizes: dict[str, int]
    fields: dict[str, str]
    layer_types: tuple[str, ...]
    rope: Rope
    eps: float
    mtp_layers: int
    tie_flags: dict[str, bool]
    origin: str = ORIGIN
    problems: tuple[Problem, ...] = ()

    @property
    def nested(self) -> bool:
        """Whether the text part is its own object (the vision-language form)."""
        return self.text is not self.raw

    @property
    def headless(self) -> bool:
        """Whether its class has no head: a base model, as embedding models are."""
        classes = self.raw.get("architectures")
        return isinstance(classes, list) and classes[:1] != [] and classes[0] in BASE_CLASSES

    @property
    def moe(self) -> bool:
        """Whether the layers are mixtures of experts."""
        return "E" in self.sizes

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config block, wherever it stands."""
        blocks = (_object(part, "", "quantization_config") for part in (self.raw, self.text))
        return next((block for block in blocks if block), None)

    @property
    def generation(self) -> dict[str, Any]:
        """What it says of how text is generated; beside text_config it wins, as in transformers."""
        stated: dict[str, Any] = {}
        for part in (self.text, self.raw):
            stated |= {f: part[f] for f in GENERATION_FIELDS if part.get(f) is not None}
        return stated

    def source_of(self, shape: str) -> str:
        """Say where the numbers of a symbolic shape come from: `hidden_size 128, ...`."""
        symbols = shape.replace("*", " ").replace("+", " ").replace(",", " ").split()
        known = dict.fromkeys(s for s in symbols if s in self.sizes)
        return ", ".join(f"{self.fields[s]} {self.sizes[s]}" for s in known)


def read_config(raw: dict[str, Any]) -> Config:
    """Resolve config.json. FormatError names the field that is missing, wrong or not supported."""
    text, prefix = _text_part(raw)
    moe = _is_moe(raw, text)
    _check_hard_wired(text, prefix)
    groups = [(text, prefix, TEXT_FIELDS), (text, prefix, MOE_FIELDS if moe else DENSE_FIELDS)]
    vision = _object(raw, "", "vision_config")
    if vision is not None:
        groups.append((vision, "vision_config.", VISION_FIELDS))
    _check_present(groups, text, prefix)
    sizes: dict[str, int] = {}
    fields = {"L": "num_hidden_layers", "kinds": _kinds_by(text)}
    for part, where, table in groups:
        for symbol, (field, default) in table.items():
            absent = "" if part.get(field) is not None else ABSENT
            sizes[symbol] = _size(part, where, field, default)
            fields[symbol] = where + field + absent
    layer_types = _layer_types(text, prefix)
    _check_sizes(sizes, fields, len(layer_types))
    return Config(
        raw=raw,
        text=text,
        vision=vision,
        sizes=sizes,
        fields=fields,
        layer_types=layer_types,
        rope=read_rope(text, prefix),
        eps=_number(text, prefix, "rms_norm_eps", 1e-6),
        mtp_layers=_mtp_layers(text, prefix),
        tie_flags=_tie_flags(raw, text),
        problems=rope_problems(text, prefix),
    )


def _kinds_by(text: Mapping[str, Any]) -> str:
    """Name what says which layer is of which kind."""
    if text.get("layer_types") is not None:
        return "layer_types"
    interval = text.get("full_attention_interval")
    return f"full_attention_interval {interval or '4 (absent, default; layer_types too)'}"


def _check_present(
    groups: Iterable[tuple[Mapping[str, Any], str, Fields]], text: Mapping[str, Any], prefix: str
) -> None:
    """Refuse a config without fields that have no default, and name all of them."""
    layers: Fields = {"": ("num_hidden_layers", None)}
    rows = [(text, prefix, layers), *groups]
    missing = [
        where + field
        for part, where, table in rows
        for field, default in table.values()
        if default is None and part.get(field) is None
    ]
    if missing:
        verb = "are" if missing[1:] else "is"
        raise FormatError(
            f"config.json: {', '.join(missing)} {verb} missing",
            fix="take config.json from the model that it was made from",
        )


def _mtp_layers(text: dict[str, Any], prefix: str) -> int:
    count = _size(text, prefix, "mtp_num_hidden_layers", 0, least=0)
    if count > MAX_LAYERS:
        raise FormatError(
            f"config.json: {prefix}mtp_num_hidden_layers is {count}, over {MAX_LAYERS}"
        )
    return count


def _text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    text = _object(raw, "", "text_config")
    return (raw, "") if text is None else (text, "text_config.")


def _object(part: Mapping[str, Any], where: str, field: str) -> dict[str, Any] | None:
    value = part.get(field)
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"config.json: {where}{field} is not an object")
    return value


def _is_moe(raw: dict[str, Any], text: dict[str, Any]) -> bool:
    """Both model types, inside and outside, must be of the family; the inner one decides."""
    outer, inner = raw.get("model_type"), text.get("model_type")
    for stated in (outer, inner) if outer and inner else (inner or outer,):
        if stated not in (*OUTER_TYPES, *TEXT_TYPES):
            known = ", ".join((*OUTER_TYPES, *TEXT_TYPES))
            raise FormatError(
                f"config.json: model_type is {stated!r:.120}, expected one of {known}\n"
                f"  why   {_why_not(str(stated))}"
            )
    kind = str(inner or outer)
    return TEXT_TYPES[OUTER_TYPES.get(kind, kind)]


def _why_not(model_type: str) -> str:
    if model_type.startswith("qwen4"):
        return "qwen4_exp has hyper-connections and another gate; it is not a Qwen3.5"
    return "qwen35 converts the Qwen3.5 family only"


def _check_hard_wired(text: dict[str, Any], prefix: str) -> None:
    for field, accepted, meaning in HARD_WIRED:
        value = text.get(field)
        known = any(type(value) is type(good) and value == good for good in accepted)
        if value is not None and not known:
            raise FormatError(
                f"config.json: {prefix}{field} is {value!r:.120}, expected {accepted[0]!r}\n"
                f"  why   {meaning} is not part of the Qwen3.5 family"
            )


def _size(
    part: Mapping[str, Any], where: str, field: str, default: int | None, least: int = 1
) -> int:
    value = _given(part, where, field, default)
    if type(value) is not int or not least <= value <= MAX_SIZE:
        raise FormatError(
            f"config.json: {where}{field} is {value!r:.120}, "
            f"expected an integer from {least} to {MAX_SIZE}"
        )
    return value


def _given(part: Mapping[str, Any], where: str, field: str, default: float | None) -> object:
    value = part.get(field)
    value = default if value is None else value
    if value is None:
        raise FormatError(f"config.json: {where}{field} is missing")
    return value


def _lost(fields: Mapping[str, str]) -> str:
    """Name every field whose default was taken."""
    names = [field.removesuffix(ABSENT) for field in fields.values() if field.endswith(ABSENT)]
    return f"add {', '.join(names)}, as the config.json of the original model has them"


def _check_sizes(sizes: Mapping[str, int], fields: Mapping[str, str], layers: int) -> None:
    """Refuse sizes that contradict each other, or that promise more tensors than anyone has."""
    for whole, part in MULTIPLES:
        if whole in sizes and sizes[whole] % sizes[part]:
            raise FormatError(
                f"config.json: {fields[whole]} is {sizes[whole]}, "
                f"expected a multiple of {fields[part]} {sizes[part]}",
                fix=_lost(fields) if ABSENT in fields[whole] + fields[part] else "",
            )
    if sizes.get("TOPK", 0) > sizes.get("E", 0):
        raise FormatError(
            f"config.json: {fields['TOPK']} is {sizes['TOPK']}, "
            f"expected at most {fields['E']} {sizes['E']}"
        )
    for symbol, most in (("E", MAX_EXPERTS // layers), ("vD", MAX_LAYERS)):
        if sizes.get(symbol, 0) > most:
            raise FormatError(
                f"config.json: {fields[symbol]} is {sizes[symbol]}, expected at most {most}"
            )


def _number(part: Mapping[str, Any], where: str, field: str, default: float | None) -> float:
    value = _given(part, where, field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise FormatError(
            f"config.json: {where}{field} is {value!r:.120}, expected a positive number"
        )
    return float(value)


def _layer_types(text: dict[str, Any], prefix: str) -> tuple[str, ...]:
    count = _size(text, prefix, "num_hidden_layers", None)
    if count > MAX_LAYERS:
        raise FormatError(f"config.json: {prefix}num_hidden_layers is {count}, over {MAX_LAYERS}")
    stated = text.get("layer_types")
    if stated is None:
        interval = _size(text, prefix, "full_attention_interval", DEFAULT_INTERVAL)
        return interval_types(interval, count)
    if not isinstance(stated, list) or len(stated) != count:
        got = len(stated) if isinstance(stated, list) else f"{stated!r:.120}"
        raise FormatError(
            f"config.json: {prefix}layer_types has {got} entries, expected {count} "
            f"({prefix}num_hidden_layers)"
        )
    for i, kind in enumerate(stated):
        if kind not in LAYER_TYPES:
            raise FormatError(
                f"config.json: {prefix}layer_types[{i}] is {kind!r:.120}, "
                f"expected {' or '.join(LAYER_TYPES)}"
            )
    return tuple(stated)


def interval_types(interval: int, count: int) -> tuple[str, ...]:
    """Return the types of `count` layers of which every `interval`-th has full attention."""
    return tuple(LAYER_TYPES[(i + 1) % interval == 0] for i in range(count))


def _tie_flags(raw: dict[str, Any], text: dict[str, Any]) -> dict[str, bool]:
    """Every tie flag that is there, by its place; a nested config can hold two that disagree."""
    parts = {"": raw} if text is raw else {"": raw, "text_config.": text}
    flags: dict[str, bool] = {}
    for where, part in parts.items():
        value = part.get("tie_word_embeddings")
        if value is not None and not isinstance(value, bool):
            raise FormatError(
                f"config.json: {where}tie_word_embeddings is {value!r:.120}, expected true or false"
            )
        if value is not None:
            flags[where + "tie_word_embeddings"] = value
    return flags
