"""What the user asked for: a recipe, read from YAML, every default resolved, unknown keys refused.

A recipe is a bundled name (`fp8-block`) or a file. Flags override it by dotted key
(`--set quantize.scale=float32`). Values are plain YAML without tags, anchors or aliases.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import yaml
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
from qwen35_convert.errors import RecipeError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_RECIPE_BYTES = 64 << 10
MAX_DEPTH = 16
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


class Export(_Part):
    """How the artifact is stored."""

    format: str = "safetensors"
    max_shard_size: int = Field(default=5 * 10**9, gt=0)

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


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that takes no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key, count in Counter(keys).items() if count > 1), None)
        if twice is not None:
            raise RecipeError(f"key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


# Without aliases no short file can grow without bound.
NOT_PLAIN = {
    yaml.TagToken: "a tag: write the plain value",
    yaml.AnchorToken: "an anchor: write the value out",
    yaml.AliasToken: "an alias: write the value out, or quote it if it is a glob",
}


ENDS = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
STARTS = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)


def _check_plain(text: str) -> None:
    """Refuse what is not plain before it is built; PyYAML's time grows with depth squared."""
    depth = 0
    for token in yaml.scan(text, Loader=_PlainLoader):
        if type(token) in NOT_PLAIN:
            raise RecipeError(f"it has {NOT_PLAIN[type(token)]}")
        depth += isinstance(token, STARTS)
        depth -= isinstance(token, ENDS)
        if depth > MAX_DEPTH:
            raise RecipeError(f"it is nested over {MAX_DEPTH} deep")


def _load_yaml(text: str, where: str) -> object:
    try:
        _check_plain(text)
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).replace("\n", "\n  ")
        raise RecipeError(f"{where} is not a recipe: {reason}") from None


def recipe_folder() -> Path:
    """Return where the bundled recipes are: inside the wheel, or at the checkout's root."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def bundled_recipes() -> list[str]:
    """Return the names of the bundled recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def headline(name: str) -> str:
    """Return the first comment line of a bundled recipe: what it is for."""
    first = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("# ")


def find_recipe(name: str) -> Path:
    """Return the path of a bundled recipe or of a file. RecipeError names the nearest."""
    if name in bundled_recipes():
        return recipe_folder() / f"{name}.yaml"
    path = Path(name)
    if _is_file(path):
        return path
    near = difflib.get_close_matches(name, bundled_recipes(), 1)
    raise RecipeError(
        f"recipe {name!r} is neither bundled nor a file"
        + (f", did you mean {near[0]!r}?" if near else "")
        + f"\n  known {', '.join(bundled_recipes())}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for any file
        return False


def read_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `KEY=VALUE` overrides. RecipeError says what is wrong where."""
    path = find_recipe(str(name))
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise RecipeError(f"{path.name} has {path.stat().st_size} bytes, over {MAX_RECIPE_BYTES}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path.name} cannot be read as UTF-8: {error}") from None
    values = _load_yaml(text, path.name)
    if not isinstance(values, dict):
        raise RecipeError(f"{path.name} holds {type(values).__name__}, expected keys and values")
    return build_recipe({"name": path.stem} | values, overrides)


def build_recipe(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Resolve a recipe given as plain values."""
    resolved = copy.deepcopy(dict(values))
    for override in overrides:
        _override(resolved, override)
    try:
        return Recipe.model_validate(resolved)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(e) for e in error.errors())) from None


def quoted(text: str) -> str:
    """Return a text as YAML takes it for nothing else, for an override."""
    return "'" + text.replace("'", "''") + "'"


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r}, expected KEY=VALUE")
    *path, last = key.split(".")
    part = values
    for segment in path:
        part = part.setdefault(segment, {})
        if not isinstance(part, dict):
            raise RecipeError(f"--set {override!r}: {segment} is a value, not a section")
    part[last] = _load_yaml(text, f"--set {key}")


def _explain(error: ErrorDetails) -> str:
    where = [str(part) for part in error["loc"]]
    if error["type"] != "extra_forbidden":
        reason = error["msg"].removeprefix("Value error, ")
        got = "" if isinstance(error["input"], dict) else f" (got {_shown(error['input'])})"
        return ": ".join(["recipe", *([".".join(where)] if where else []), reason]) + got
    known = _known_keys(where[:-1])
    near = difflib.get_close_matches(where[-1], known, 1)
    hint = f", did you mean {near[0]!r}?" if near else f", expected one of {', '.join(known)}"
    return f"recipe: there is no key {'.'.join(where)!r}{hint}"


def _shown(value: object) -> str:
    """Return the start of a value; Python refuses to print integers of over 4300 digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number of thousands of digits"


def _known_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for segment in path:
        if not segment.isdigit():
            kind = model.model_fields[segment].annotation
            named: dict[str, type[BaseModel]] = {"rules": Rule, "calibrate": Calibrate}
            model = named.get(segment) or cast("type[BaseModel]", kind)
    return list(model.model_fields)
