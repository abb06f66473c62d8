"""config.json, read: sizes by symbol, layer types, rope, tie flags; nothing is guessed.

Sizes are always read, never derived from each other (head_dim is 256 although 5120 / 24 is not).
A field that is absent or null takes transformers' default for its class, and says so when a shape
disagrees. `layer_types` wins over `full_attention_interval`. `config_fields` is the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.errors import FormatError
from formats.family.config_fields import (
    ABSENT,
    BASE_CLASSES,
    DEFAULT_INTERVAL,
    DENSE_FIELDS,
    GENERATION_FIELDS,
    LAYER_TYPES,
    MAX_LAYERS,
    MAX_SIZE,
    MOE_FIELDS,
    ORIGIN,
    TEXT_FIELDS,
    VISION_FIELDS,
    Group,
    interval_types,
)
from formats.family.config_refusals import (
    check_hard_wired,
    check_present,
    check_sizes,
    is_moe,
)
from formats.family.rope import Rope, read_rope, rope_problems
from formats.nearest import one_of
from formats.stored import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    moe = is_moe(raw, text)
    check_hard_wired(text, prefix)
    groups = [(text, prefix, TEXT_FIELDS), (text, prefix, MOE_FIELDS if moe else DENSE_FIELDS)]
    vision = _object(raw, "", "vision_config")
    if vision is not None:
        groups.append((vision, "vision_config.", VISION_FIELDS))
    check_present(groups, text, prefix)
    sizes, sources = _sizes(groups)
    fields = {"L": "num_hidden_layers", "kinds": _kinds_by(text)} | sources
    layer_types = _layer_types(text, prefix)
    check_sizes(sizes, fields, len(layer_types))
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


def _sizes(groups: Sequence[Group]) -> tuple[dict[str, int], dict[str, str]]:
    """Return sizes by symbol, and the field that says each."""
    sizes, fields = {}, {}
    for part, where, table in groups:
        for symbol, (field, default) in table.items():
            absent = "" if part.get(field) is not None else ABSENT
            sizes[symbol] = _size(part, where, field, default)
            fields[symbol] = where + field + absent
    return sizes, fields


def _kinds_by(text: Mapping[str, Any]) -> str:
    """Name what says which layer is of which kind."""
    if text.get("layer_types") is not None:
        return "layer_types"
    interval = text.get("full_attention_interval")
    return f"full_attention_interval {interval or '4 (absent, default; layer_types too)'}"


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
                f"expected {one_of(LAYER_TYPES)}"
            )
    return tuple(stated)


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
