"""What the user asked for: a recipe, read from YAML, every default resolved, unknown keys refused.

A recipe is a bundled name (`fp8-block`) or a file, which may extend another (`files`). Flags
override it by dotted key (`--set quantize.scale=float32`). Values are plain YAML (`plain_yaml`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from formats.quant_methods import COMPRESSED
from qwen35_convert.errors import Mistake, Place, RecipeError
from qwen35_convert.plain_yaml import Places, Spot, load_yaml
from qwen35_convert.recipe.files import EXTENDS, Written, find_recipe, read_written
from qwen35_convert.recipe.mistakes import explain
from qwen35_convert.recipe.parts import (
    FORMATS,
    MAX_GLOB,
    NO_CACHE,
    BenchSweep,
    Export,
    Quantize,
    Section,
    Verify,
)


class Recipe(Section):
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
        if not form.caches and self.quantize.kv_cache != NO_CACHE:
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
