"""The sections of a recipe, with their defaults; `recipe` puts them together and reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from formats.chat_template import has_places
from formats.nearest import one_of
from quant.choices import Choices
from quant.registry import SCHEMES
from qwen35_convert.sizes import parse_size

MAX_GLOB = 500
LONGEST = 1 << 20


def _nameable(name: str) -> str:
    """Return a file's name. ValueError for one that no system takes."""
    if "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file: it holds a NUL")
    return name


FileName = Annotated[str, AfterValidator(_nameable)]
Count = Annotated[int, Field(ge=1, le=LONGEST)]
"""Of tokens or sequences that `bench` times."""


@dataclass(frozen=True, slots=True)
class Format:
    """What a format lets a recipe say.

    own_layout  it has its own layout: `layout` and `experts` cannot be chosen
    mixes       its types are chosen tensor by tensor: `mix` and `imatrix` mean something
    caches      it has a place for scales of keys and values: `kv_cache` means something
    """

    own_layout: bool = False
    mixes: bool = False
    caches: bool = False


FORMATS = {"safetensors": Format(caches=True), "gguf": Format(own_layout=True, mixes=True)}
NEAREST, SWEEP, GPTQ = "nearest", "sweep", "gptq"
NO_CACHE = "none"


class Section(BaseModel):
    """A part of a recipe: frozen, strict in its types, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Rule(Section):
    """One line of `quantize.rules`: a glob over our names and the scheme its tensors get."""

    match: str = Field(max_length=MAX_GLOB)
    scheme: str


class Calibrate(Section):
    """What calibration reads: the first `tokens` of a text file; `default` is the bundled text."""

    text: FileName = "default"
    tokens: int = Field(default=32768, gt=1)

    @property
    def file(self) -> str | None:
        """Return the text's file; None if it is the bundled one."""
        return None if self.text == "default" else self.text


class Quantize(Section):
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
    imatrix: FileName | None = None

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
    means = values.get("method", NEAREST), values.get("kv_cache", NO_CACHE)
    return means != (NEAREST, NO_CACHE) or _scales_inputs(values)


def _scales_inputs(values: Mapping[str, Any]) -> bool:
    """Whether a scheme that is asked for stores a scale of inputs, which a text gives."""
    rules = values.get("rules")
    objects = [values, *(rules if isinstance(rules, list | tuple) else ())]
    names = {str(one.get("scheme")) for one in objects if isinstance(one, dict)}
    return any(SCHEMES[name].static_inputs for name in names & SCHEMES.keys())


class Metadata(Section):
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


class Export(Section):
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
            raise ValueError(f"Input should be {one_of(map(repr, FORMATS))}")
        return value

    @field_validator("chat_template")
    @classmethod
    def _with_places(cls, value: str | None) -> str | None:
        if value is not None and not has_places(value):
            raise ValueError(
                "is not the text of a template, which has places for messages; "
                "--chat-template reads one from a file"
            )
        return value

    @field_validator("max_shard_size", mode="before")
    @classmethod
    def _bytes(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value


class Verify(Section):
    """How the artifact is proven; text and thresholds are for level logits.

    A threshold raises the level to logits; level logits without `max_kl` has a default for it.
    """

    level: Literal["structure", "tensors", "logits"] = "tensors"
    text: FileName = "default"
    max_kl: float | None = Field(default=None, ge=0)
    min_top1: float | None = Field(default=None, ge=0, le=1)

    @field_validator("max_kl", "min_top1", mode="before")
    @classmethod
    def _exponent(cls, value: object) -> object:
        """Take 1e-3 for a number; YAML 1.1 takes it for text, for want of a point."""
        if isinstance(value, str) and re.fullmatch(r"\d{1,4}e[+-]?\d{1,3}", value, re.ASCII):
            return float(value)
        return value


class BenchSweep(Section):
    """What `bench` times of the artifact: prompts of these lengths, batches of these sizes."""

    prefill: tuple[Count, ...] = (512, 8192)
    batch: tuple[Count, ...] = (1, 8, 64)

    @field_validator("prefill", "batch", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value
