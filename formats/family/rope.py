"""The rotary embedding as config.json states it: base, rotated share, and how it is scaled.

    rope_parameters {rope_type, rope_theta, ...}      or the older rope_scaling and rope_theta

No weight depends on any of it, so every form that transformers has is carried; what computes one is
`runtime.kernels.attention.frequencies`, what GGUF can say of one is `formats.gguf.rope`.

Source: transformers' `modeling_rope_utils` at 5.24. Traps: where both blocks stand there, it takes
rope_scaling alone and the theta in the other is lost; `original_max_position_embeddings` beside the
block wins over the one inside; the base is 1e4 where none is stated, which no Qwen3.5 has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

from formats.errors import FormatError
from formats.stored import Problem

DEFAULT, YARN = "default", "yarn"
ALIASES = {"mrope": DEFAULT}
PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
FACTOR, ORIGINAL, ATTENTION = "factor", "original_max_position_embeddings", "attention_factor"
MAX_LENGTH = (1 << 31) - 1
LONGEST, POSITIONS = "max_position_embeddings", 32768  # the class's default
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}

# rope_type: its fields, and whether each must be there
KINDS: dict[str, dict[str, bool]] = {
    DEFAULT: {},
    "linear": {FACTOR: True},
    "dynamic": {FACTOR: True},
    YARN: {FACTOR: True, ORIGINAL: True, ATTENTION: False, **dict.fromkeys(BETAS, False),
           "mscale": False, "mscale_all_dim": False, "truncate": False},
    "longrope": {"short_factor": True, "long_factor": True, ORIGINAL: True, FACTOR: False,
                 ATTENTION: False},
    "llama3": {FACTOR: True, ORIGINAL: True, "low_freq_factor": True, "high_freq_factor": True},
    "proportional": {FACTOR: False},
}  # fmt: skip
LISTS = ("short_factor", "long_factor")
FLAGS = ("truncate",)
# Kinds whose factor, where it is null, is the ratio of the two context lengths.
BY_RATIO = (YARN, "longrope")


Field = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Scaling:
    """A rope_type other than the default one, and its fields with what absent ones come to.

    It can be hashed, so a list is a tuple.
    """

    kind: str
    fields: tuple[tuple[str, Field], ...]

    def __getitem__(self, name: str) -> float:
        """Return a number (or a flag) by its name; KeyError if this kind has no such field."""
        value = dict(self.fields)[name]
        assert not isinstance(value, tuple), f"{name} is a list"
        return value

    def as_dict(self) -> dict[str, Field]:
        """Return the fields by name."""
        return dict(self.fields)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, rotated share of head_dim, mRoPE sections (empty: plain), scaling.

    stated  the block of config.json it was read from, without nulls
    """

    theta: float
    partial: float
    sections: tuple[int, ...]
    scaling: Scaling | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Its rope_type."""
        return self.scaling.kind if self.scaling else DEFAULT

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of `rope_parameters` with what absent ones come to."""
        sections = {"mrope_section": list(self.sections)} if self.sections else {}
        scaling = self.scaling.as_dict() if self.scaling else {}
        return {
            "rope_type": self.kind,
            "partial_rotary_factor": self.partial,
            "rope_theta": self.theta,
            **sections,
            **scaling,
        }


def read_rope(text: Mapping[str, Any], prefix: str) -> Rope:
    """Read the rope block of a text config; FormatError names the field that is wrong."""
    name = PARAMETERS if _block(text, prefix, PARAMETERS) else SCALING
    return _read(text, prefix, name)


def rope_problems(text: Mapping[str, Any], prefix: str) -> tuple[Problem, ...]:
    """Return the problem of two blocks that do not say the same, of which engines take either."""
    if not (_block(text, prefix, PARAMETERS) and text.get(SCALING)):
        return ()
    try:
        if _read(text, prefix, SCALING).as_dict() == _read(text, prefix, PARAMETERS).as_dict():
            return ()
    except FormatError:
        pass  # such as one that is no object, or lacks the theta that stands in the other
    problem = (
        f"has {prefix}{SCALING} beside {prefix}{PARAMETERS}, and they differ: transformers takes "
        f"{SCALING} alone, with a rope_theta of 10000 where it states none"
    )
    remedy = f"put the fields of {SCALING} into {PARAMETERS}, and remove {SCALING}"
    return (Problem("config.json", problem, remedy),)


def _block(text: Mapping[str, Any], prefix: str, name: str) -> Mapping[str, Any]:
    value = text.get(name)
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"config.json: {prefix}{name} is not an object")
    return value or {}


def _read(text: Mapping[str, Any], prefix: str, name: str) -> Rope:
    stated = {key: value for key, value in _block(text, prefix, name).items() if value is not None}
    where = f"{prefix}{name if stated else PARAMETERS}."
    part = {**text, **stated}
    sections = [] if part.get("mrope_section") is None else part["mrope_section"]
    if not isinstance(sections, list) or not all(type(s) is int and s >= 0 for s in sections):
        raise FormatError(f"config.json: {where}mrope_section is {sections!r:.120}, expected sizes")
    partial = 0.25 if part.get("partial_rotary_factor") is None else part["partial_rotary_factor"]
    partial = _number(where, "partial_rotary_factor", partial)
    if partial > 1:
        raise FormatError(f"config.json: {where}partial_rotary_factor is {partial}, over 1")
    if part.get("rope_theta") is None:
        raise FormatError(f"config.json: {where}rope_theta is missing")
    theta = _number(where, "rope_theta", part["rope_theta"])
    scaling = _scaling(text, stated, where)
    if scaling is not None and theta <= 1:
        raise FormatError(f"config.json: {where}rope_theta is {theta}, expected more than 1")
    return Rope(theta, partial, tuple(sections), scaling, stated)


def _scaling(text: Mapping[str, Any], stated: Mapping[str, Any], where: str) -> Scaling | None:
    kind = stated.get("rope_type", stated.get("type", DEFAULT))
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise FormatError(
            f"config.json: {where}rope_type is {kind!r:.120}, expected one of {', '.join(KINDS)}"
        )
    fields = {name: stated[name] for name in KINDS[kind] if name in stated}
    fields |= _lengths(text, kind, fields)
    for name, required in KINDS[kind].items():
        if name in fields:
            fields[name] = _checked(where, name, fields[name])
        elif required:
            raise FormatError(
                f"config.json: {where}{name} is missing, which rope_type {kind!r} has"
            )
    if kind == YARN:
        fields = _yarn(fields)
    return Scaling(kind, tuple(fields.items())) if kind != DEFAULT else None


def _lengths(text: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length of the context before, and a null factor, where this kind has them."""
    if ORIGINAL not in KINDS[kind]:
        return {}
    longest = POSITIONS if text.get(LONGEST) is None else text[LONGEST]
    original = fields.get(ORIGINAL) if text.get(ORIGINAL) is None else text[ORIGINAL]
    if original is None:
        return {ORIGINAL: longest}
    by_ratio = kind in BY_RATIO and FACTOR not in fields
    if not by_ratio or not all(type(n) is int and n > 0 for n in (longest, original)):
        return {ORIGINAL: original}
    return {ORIGINAL: original, FACTOR: longest / original}


def _checked(where: str, name: str, value: object) -> Field:
    """Return a field's value in the type it has."""
    if name in FLAGS:
        if not isinstance(value, bool):
            raise FormatError(
                f"config.json: {where}{name} is {value!r:.120}, expected true or false"
            )
        return value
    if name in LISTS:
        if not isinstance(value, list):
            raise FormatError(f"config.json: {where}{name} is {value!r:.120}, expected numbers")
        return tuple(_number(where, name, one) for one in value)
    if name != ORIGINAL:
        return _number(where, name, value)
    if type(value) is not int or not 0 < value <= MAX_LENGTH:
        raise FormatError(f"config.json: {where}{name} is {value!r:.120}, expected a length")
    return value


def _number(where: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise FormatError(
            f"config.json: {where}{name} is {value!r:.120}, expected a positive number"
        )
    return float(value)


def _yarn(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers computes with: absent fields filled in, mscale worked out."""
    factor, scales = fields[FACTOR], (fields.get("mscale"), fields.get("mscale_all_dim"))
    attention = fields.get(ATTENTION)
    if attention is None:
        attention = attention_scale(factor)
        if all(scales):
            attention = attention_scale(factor, scales[0]) / attention_scale(factor, scales[1])
    return {
        FACTOR: factor,
        ORIGINAL: fields[ORIGINAL],
        ATTENTION: attention,
        **{name: fields.get(name, default) for name, default in BETAS.items()},
        "truncate": fields.get("truncate", True),
    }


def attention_scale(factor: float, mscale: float | None = 1.0) -> float:
    """Return what YaRN multiplies cosines and sines by, where nothing else is stated."""
    return 1.0 if factor <= 1 or mscale is None else 0.1 * mscale * log(factor) + 1.0
