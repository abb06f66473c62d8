"""What the user asked for: a recipe, read from YAML, every default resolved, unknown keys refused.

A recipe is a bundled name (`fp8-block`) or a file, which may extend another (`recipe_files`). Flags
override it by dotted key (`--set quantize.scale=float32`). Values are plain YAML (`plain_yaml`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from quant.registry import SCHEMES
from quant.scheme import COMPRESSED, Choices
from qwen35_convert.errors import Mistake, Place, RecipeError
from qwen35_convert.plain_yaml import Places, Spot, load_yaml
from qwen35_convert.recipe_files import EXTENDS, Written, find_recipe, read_written
from qwen35_convert.recipe_mistakes import explain

MAX_GLOB = 500
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True, slots=True)
class Format:
    """What a format lets a recipe say.

    own_layout  it has its own layout: `layout` and `experts` cannot be chosen
    mixes       its types are chosen tensor by tensor: `mix` and `imatrix` mean something
    calibrates  its schemes can be calibrated: `method` and `calibrate` mean something
    """

    own_layout: bool = False
    mixes: bool = False
    calibrates: bool = False


FORMATS = {"safetensors": Format(calibrates=True), "gguf": Format(own_layout=True, mixes=True)}
NEAREST, SWEEP, GPTQ = "nearest", "sweep", "gptq"
NO_CACHE = "none"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Rule(_Part):
    """One line of `quantize.rules`: a glob over our names and the scheme its tensors get."""

    match: str = Field(max_length=MAX_GLOB)
    scheme: str


class Calibrate(_Part):
    """What calibration reads: the first `tokens` of a text file; `default` is the bundled text."""

    text: str = "default"
    tokens: int = Field(default=32768, gt=1)

    @property
    def file(self) -> str | None:
        """Return the text's file; None if it is the bundled one."""
        return None if self.text == "default" else self.text


class Quantize(_Part):
    """Which scheme, which scale type, in whose dialect, which exceptions, how codes are found.

    method    nearest: by the weights alone; sweep: scales that suit the inputs of a text; gptq:
              codes that make up for each other's errors, too
    kv_cache  fp8: scales of keys and values, from a text, for engines that cache them in FP8

    Of a GGUF file `scheme` names the types, and `mix` who chooses them: `mix: llama.cpp` asks for
    theirs. `imatrix` is a file of llama.cpp's with the importance of every column.
    """

    scheme: str = "fp8-block"
    scale: Literal["pow2", "float32", "bfloat16"] = "pow2"
    group: Literal[32, 64, 128] | None = None
    symmetric: bool | None = None
    dialect: Literal["compressed-tensors", "modelopt", "gptq"] = "compressed-tensors"
    method: Literal["nearest", "sweep", "gptq"] = "nearest"
    kv_cache: Literal["none", "fp8"] = "none"
    calibrate: Calibrate | None = None
    rules: tuple[Rule, ...] = ()
    mix: Literal["ours", "llama.cpp"] = "ours"
    imatrix: str | None = None

    @property
    def files(self) -> list[Path]:
        """Return what is read beside the source: an imatrix.

        A text has a place of its own in the receipt.
        """
        return [Path(self.imatrix)] if self.imatrix else []

    @property
    def chosen_by(self) -> Calibrate | None:
        """Return the text that codes are chosen by; None if they are the nearest."""
        return None if self.method == NEAREST else self.calibrate

    @property
    def choices(self) -> Choices:
        """Return what is chosen of schemes that have a choice."""
        return Choices(self.scale, self.group, self.symmetric, self.dialect)

    @field_validator("rules", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _calibrated_by_default(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("calibrate") is not None:
            return values
        return values | {"calibrate": {}} if _reads_text(values) else values

    @model_validator(mode="after")
    def _calibrated_for_a_use(self) -> Quantize:
        if self.calibrate is not None and not _reads_text(self.model_dump()):
            raise ValueError(
                "calibrate is for method sweep or gptq, for schemes that scale inputs and for "
                "kv_cache fp8, and method is nearest"
            )
        return self


def _reads_text(values: Mapping[str, Any]) -> bool:
    """Whether something that is asked for follows from a text."""
    asked = values.get("method", NEAREST), values.get("kv_cache", NO_CACHE)
    return asked != (NEAREST, NO_CACHE) or _scales_inputs(values)


def _scales_inputs(values: Mapping[str, Any]) -> bool:
    """Whether a scheme that is asked for stores a scale of inputs, which a text gives."""
    rules = values.get("rules")
    asked = [values, *(rules if isinstance(rules, list | tuple) else ())]
    names = {str(one.get("scheme")) for one in asked if isinstance(one, dict)}
    return any(SCHEMES[name].static_inputs for name in names & SCHEMES.keys())


class Metadata(_Part):
    """What is said of the model in place of what the source's README.md says of itself."""

    name: str | None = None
    author: str | None = None
    version: str | None = None
    organization: str | None = None
    description: str | None = None
    quantized_by: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    url: str | None = None
    repo_url: str | None = None
    tags: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    @field_validator("tags", "languages", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class Export(_Part):
    """How the artifact is stored, and what lies in it beside the tensors.

    chat_template  the text of a template in place of the source's
    """

    format: str = "safetensors"
    max_shard_size: int = Field(default=5 * 10**9, gt=0)
    chat_template: str | None = Field(default=None, max_length=64 << 10)
    metadata: Metadata | None = None

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in FORMATS:
            raise ValueError(f"Input should be {' or '.join(map(repr, FORMATS))}")
        return value

    @field_validator("max_shard_size", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value


class Verify(_Part):
    """How the artifact is proven; text and thresholds are for level logits.

    A threshold raises the level to logits; level logits without `max_kl` has a default for it.
    """

    level: Literal["structure", "tensors", "logits"] = "tensors"
    text: str = "default"
    max_kl: float | None = Field(default=None, ge=0)
    min_top1: float | None = Field(default=None, ge=0, le=1)

    @field_validator("max_kl", "min_top1", mode="before")
    @classmethod
    def _exponent(cls, value: object) -> object:
        """Take 1e-3 for a number; YAML 1.1 takes it for text, for want of a point."""
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}e[+-]?\d{1,3}", value, re.ASCII):
            return float(value)
        return value


class BenchSweep(_Part):
    """What `bench` times of the artifact: prompts of these lengths, batches of these sizes."""

    prefill: tuple[int, ...] = (512, 8192)
    batch: tuple[int, ...] = (1, 8, 64)

    @field_validator("prefill", "batch", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


class Recipe(_Part):
    """A whole recipe; see the files in `recipes/`.

    `only` is a glob over our names: a slice of a model, to look at and not to load.
    """

    name: str = "custom"
    layout: Literal["text", "hub", "same"] = "text"
    experts: Literal["split", "fused", "same"] = "split"
    mtp: Literal["keep", "drop"] = "keep"
    vision: Literal["keep", "drop"] = "drop"
    only: str | None = Field(default=None, max_length=MAX_GLOB)
    quantize: Quantize = Quantize()
    export: Export = Export()
    verify: Verify = Verify()
    bench: BenchSweep = BenchSweep()

    @model_validator(mode="before")
    @classmethod
    def _vision_follows_layout(cls, values: object) -> object:
        if isinstance(values, dict) and "vision" not in values:
            kept = values.get("layout", "text") != "text"
            return values | {"vision": "keep" if kept else "drop"}
        return values

    @model_validator(mode="after")
    def _format_fits(self) -> Recipe:
        """Hold the keys apart that only some formats know."""
        form, name = FORMATS[self.export.format], self.export.format
        if form.own_layout and (self.layout != "text" or self.experts != "split"):
            raise ValueError(
                f"export.format is {name}, which has its own layout: leave layout and experts out"
            )
        if form.own_layout and self.quantize.dialect != COMPRESSED:
            raise ValueError(f"export.format is {name}: leave quantize.dialect out")
        if not form.mixes and (self.quantize.mix != "ours" or self.quantize.imatrix):
            mixing = " or ".join(name for name, form in FORMATS.items() if form.mixes)
            raise ValueError(f"quantize.mix and quantize.imatrix are for export.format {mixing}")
        if not form.calibrates and self.quantize.method != NEAREST:
            raise ValueError(
                f"quantize.method is {self.quantize.method}, but export.format {name} takes what a "
                "text says of its columns from a file: quantize.imatrix, which `qwen35 imatrix` "
                "makes"
            )
        if not form.calibrates and self.quantize.kv_cache != NO_CACHE:
            raise ValueError(
                f"quantize.kv_cache is {self.quantize.kv_cache}, but export.format {name} has no "
                "place for scales of keys and values"
            )
        return self

    @model_validator(mode="after")
    def _vision_fits_layout(self) -> Recipe:
        if FORMATS[self.export.format].own_layout:
            return self
        if self.layout == "text" and self.vision == "keep":
            raise ValueError("vision is keep, but layout text has no vision: use layout hub")
        if self.layout == "hub" and self.vision == "drop":
            raise ValueError("vision is drop, but layout hub names vision: use layout text")
        return self


def parse_size(text: str) -> int:
    """Return the bytes in `5GB`, `500 MB`, `1GiB` or a plain number. ValueError if it is none."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if not found or found[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no size, expected for example 5GB or 500MB")
    return int(Fraction(found[1]) * UNITS[found[2].upper()])


def read_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `KEY=VALUE` overrides. RecipeError says what is wrong where."""
    path = find_recipe(str(name))
    written = read_written(path)
    return _resolve(replace(written, values={"name": path.stem, **written.values}), overrides)


def build_recipe(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Resolve a recipe given as plain values."""
    return _resolve(Written(values), overrides)


def _resolve(written: Written, overrides: Sequence[str]) -> Recipe:
    values, places = copy.deepcopy(dict(written.values)), dict(written.places)
    for override in overrides:
        _override(values, places, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError.of(explain(error, places, Recipe)) from None


def quoted(text: str) -> str:
    """Return a text as YAML takes it for nothing else, for an override."""
    return "'" + text.replace("'", "''") + "'"


def _override(values: dict[str, Any], places: Places, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r}, expected KEY=VALUE")
    if key == EXTENDS:
        raise RecipeError(f"--set {override!r}: only a file extends a recipe")
    *path, last = key.split(".")
    part = values
    for segment in path:
        part = part.setdefault(segment, {})
        if not isinstance(part, dict):
            raise RecipeError(f"--set {override!r}: {segment} is a value, not a section")
    flag = Place(f"--set {key}")
    try:
        part[last], _ = load_yaml(text, flag.name)
    except RecipeError as error:
        raise RecipeError.of([Mistake(one.message, flag) for one in error.mistakes]) from None
    whole = (*path, last)
    for old in [place for place in places if place[: len(whole)] == whole]:
        del places[old]
    places[whole] = Spot(flag, flag)
