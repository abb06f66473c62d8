"""The rotary embedding in a GGUF file's metadata, written and read.

    rope.scaling.type   none | linear | yarn         absent: linear, if a factor is there
    rope.scaling.factor, .original_context_length    as in config.json
    rope.scaling.yarn_attn_factor, .yarn_beta_*      as llama.cpp's converter writes what is stated
    rope.scaling.attn_factor                         what YaRN's own attention factor is times this

Measured on llama.cpp b11549: for these architectures it reads the first two lines and the last.
yarn_attn_factor and the betas change nothing, so an attention factor that is not YaRN's own is
written as attn_factor too, and other betas need a flag.

Source: llama.cpp's `conversion/base.py`, `src/llama-context.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose, nextafter
from typing import Any

from formats.errors import FormatError
from formats.family.config import Config
from formats.family.config_fields import MAX_SIZE
from formats.family.rope import (
    ATTENTION,
    BETAS,
    DEFAULT,
    FACTOR,
    ORIGINAL,
    YARN,
    Scaling,
    attention_scale,
)
from formats.gguf.keys import Keys, shown

Row = tuple[str, str, Any]
SECTIONS = [11, 11, 10, 0]
# Where the sections are: llama.cpp's key, and those of Ollama's converter, which does not pad them.
SECTION_KEYS = ("rope.dimension_sections", "rope.mrope_section", "mrope_sections")
PREFIX = "rope.scaling."
NONE, LINEAR = "none", "linear"
OLD_FACTOR = "rope.scale_linear"
# A key under PREFIX that says what a field of rope_parameters does.
STATED = {ATTENTION: "yarn_attn_factor", "beta_fast": "yarn_beta_fast",
          "beta_slow": "yarn_beta_slow"}  # fmt: skip
# rope_type: why no GGUF file of this architecture can say it
UNSAID = {
    "longrope": "llama.cpp has no factors by dimension for this architecture",
    "llama3": "llama.cpp has no factors by dimension for this architecture",
    "proportional": "llama.cpp rotates the first dimensions only",
}
ROUNDING = 2.0**-22


def scaling_rows(config: Config) -> Iterator[Row]:
    """Yield what a file says of the scaling, in llama.cpp's order; FormatError if it cannot."""
    rope, scaling = config.rope, config.rope.scaling
    if scaling is None or scaling.kind == "dynamic":
        return
    _check_sayable(config, scaling)
    yield PREFIX + "type", "string", scaling.kind
    yield PREFIX + "factor", "float32", scaling[FACTOR]
    if scaling.kind != YARN:
        return
    yield PREFIX + "original_context_length", "uint32", scaling[ORIGINAL]
    ratio = scaling[ATTENTION] / attention_scale(scaling[FACTOR])
    another = not isclose(ratio, 1, rel_tol=ROUNDING)
    for field, key in STATED.items():
        if field in rope.stated or (field == ATTENTION and another):
            yield PREFIX + key, "float32", scaling[field]
    if another:
        yield PREFIX + "attn_factor", "float32", ratio


def _check_sayable(config: Config, scaling: Scaling) -> None:
    """Refuse a scaling that GGUF has no keys for. FormatError."""
    if scaling.kind in UNSAID:
        got, expected = (
            f"rope_type {config.rope.kind!r}",
            ", ".join(map(repr, (DEFAULT, LINEAR, YARN))),
        )
        why = UNSAID[scaling.kind]
    elif scaling.kind == YARN and not scaling["truncate"]:
        got, expected = "truncate false of rope_type 'yarn'", "true"
        why = "llama.cpp rounds the bounds of the ramp to whole dimensions"
    else:
        return
    subject, what = f"{config.origin}: {got}", "has no place in a GGUF file"
    raise FormatError(subject, what, expected, "convert to a folder", where=why)


def rope_notes(config: Config) -> Iterator[str]:
    """Yield what llama.cpp does with the rope of this config, where it is not what is said."""
    scaling = config.rope.scaling
    if scaling is None:
        return
    if scaling.kind == "dynamic":
        yield (
            "rope_type is dynamic, which GGUF cannot express: up to the context length it changes "
            "nothing, beyond it llama.cpp does not scale"
        )
    if scaling.kind == YARN:
        other = {f: scaling[f] for f, usual in BETAS.items() if scaling[f] != usual}
        flags = " ".join(f"--yarn-{f.replace('_', '-')} {value:g}" for f, value in other.items())
        if flags:
            yield f"llama.cpp reads these from its command line, not from the file: {flags}"


def sections(config: Config) -> list[int] | None:
    """Return the four sections of mRoPE, None if there are none. FormatError for other counts."""
    stated = config.rope.sections
    if not stated:
        return None
    if len(stated) > 4 or max(stated) > MAX_SIZE or not any(stated):
        raise FormatError(
            f"{config.origin}: mrope_section is {list(stated)}, expected 1 to 4 sizes"
        )
    return [*stated, *[0] * (4 - len(stated))]


def dimensions(config: Config) -> int:
    """Return how many dimensions of a head are rotated: pairs, and at least one."""
    turned = int(config.sizes["HD"] * config.rope.partial)
    if turned < 2 or turned % 2:
        raise FormatError(
            f"{config.origin}: partial_rotary_factor {config.rope.partial} of "
            f"{config.fields['HD']} {config.sizes['HD']} is {turned}, expected an even number"
        )
    return turned


def rope_parameters(keys: Keys) -> dict[str, Any]:
    """Return the block of config.json that says what the keys do."""
    width, turned = keys.size("attention.key_length"), keys.size("rope.dimension_count")
    if turned > width or turned % 2:
        keys.fail("rope.dimension_count", f"is {turned}, expected an even number up to {width}")
    theta, part = keys.real("rope.freq_base"), turned / width
    return {
        "rope_type": DEFAULT,
        "rope_theta": int(theta) if theta.is_integer() else theta,
        # the quotient can be rounded down, and would then lose a dimension
        "partial_rotary_factor": part if int(part * width) == turned else nextafter(part, 1),
        **_sections(keys),
        **_scaling(keys),
    }


def _sections(keys: Keys) -> Mapping[str, Any]:
    """Return the three sizes, or four if the last is not 0; none if no writer's key is there."""
    key = next((key for key in SECTION_KEYS if key in keys), None)
    if key is None:
        return {}
    stated = keys.pair(key).value
    sizes = isinstance(stated, list) and all(type(s) is int and s >= 0 for s in stated)
    if not sizes or len(stated) not in {3, 4} or not any(stated):
        keys.fail(key, f"is {shown(stated)}, expected 3 or 4 sizes")
    used = list(stated) if any(stated[3:]) else list(stated[:3])
    return {"mrope_section": used, "mrope_interleaved": True}


def _scaling(keys: Keys) -> Mapping[str, Any]:
    kind = keys.pair(PREFIX + "type").value if PREFIX + "type" in keys else LINEAR
    if kind not in (NONE, LINEAR, YARN):
        keys.fail(PREFIX + "type", f"is {shown(kind)}, expected {NONE!r}, {LINEAR!r} or {YARN!r}")
    factor = next((keys.real(k) for k in (PREFIX + "factor", OLD_FACTOR) if k in keys), 1.0)
    times = PREFIX + "attn_factor"
    extra = keys.real(times) if times in keys else 1.0
    if kind == YARN:
        return {"rope_type": YARN, FACTOR: factor, **_yarn(keys, factor, extra)}
    if extra != 1.0:
        keys.fail(times, f"is {extra}, expected 1: config.json has no field for it without YaRN")
    return {} if kind == NONE or factor == 1.0 else {"rope_type": LINEAR, FACTOR: factor}


def _yarn(keys: Keys, factor: float, extra: float) -> Mapping[str, Any]:
    length = PREFIX + "original_context_length"
    result: dict[str, Any] = {ORIGINAL: keys.size(length if length in keys else "context_length")}
    for field, key in STATED.items():
        if PREFIX + key in keys:
            result[field] = keys.real(PREFIX + key)
    if extra != 1.0:
        result.setdefault(ATTENTION, extra * attention_scale(factor))
    return result
