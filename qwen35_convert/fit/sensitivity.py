"""The table that `qwen35 sensitivity` writes: what each unit weighs and costs in each form.

It is JSON. It holds no time and no path of a machine: the same source, recipe, text and machine
give the same table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import FormatError
from formats.json_file import parse_object
from formats.nearest import one_of
from formats.stored import KEEP
from quant.ggml import kinds
from quant.registry import SCHEMES
from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.measure import Measured
from qwen35_convert.fit.scales import Places
from qwen35_convert.fit.sizes import Sizes, Unit
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.versions import version

SCHEMA = "qwen35-sensitivity"
SCHEMA_VERSION = 2
GGUF_FORMS = (
    "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "bf16",
)  # fmt: skip
FOLDER_FORMS = ("int4", "nvfp4a16", "fp8-channel", "fp8-block", "int8", "keep")
FORMS = {"gguf": GGUF_FORMS, "safetensors": FOLDER_FORMS}
DIGITS = 9
MOST = 1e6  # nats: a uniform guess over any vocabulary is far less


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What was measured, as plain values under the names of the file."""

    values: Mapping[str, Any]

    def cost(self, unit: Unit, form: str) -> float | None:
        """Return the mean KL in nats that is predicted of a unit in a form; None: not measured."""
        entry = self.values["units"].get(unit.name, {}).get("forms", {}).get(form)
        return None if entry is None else float(entry["kl"])

    def content(self) -> bytes:
        """Return the file."""
        return (json.dumps(self.values, indent=1) + "\n").encode()

    @property
    def forms(self) -> tuple[str, ...]:
        """Return every form of which a cost is known."""
        units = self.values["units"].values()
        return tuple(dict.fromkeys(form for unit in units for form in unit["forms"]))

    def check(self, sizes: Sizes) -> None:
        """Refuse a table of another model, or of weights encoded by other means. RecipeError."""
        units = self.values["units"]
        wanted, measured = (
            _means(one) for one in (sizes.recipe.model_dump(), self.values["recipe"])
        )
        if wanted != measured:
            got = f"was measured with {_told(measured)}; the recipe has {_told(wanted)}"
            expected = "the same method, and an imatrix in both or in neither"
            fix = "give `qwen35 sensitivity` the same --recipe and --set"
            raise RecipeError("--sensitivity", got, expected, fix)
        for unit in sizes.units:
            entry = units.get(unit.name)
            if entry is None or entry["elements"] != unit.elements:
                got = "is not in the table" if entry is None else "has another size there"
                raise RecipeError(
                    f"--sensitivity: {unit.name}", got, "the table of this source and layout",
                    "make it with `qwen35 sensitivity` and the same recipe",
                )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Basis:
    """What a table was measured of: files by name with size and sha256, and the text."""

    source: Mapping[str, Any]
    text: Mapping[str, Any]


def table_of(measured: Measured, sizes: Sizes, basis: Basis, layers: int) -> Sensitivity:
    """Return the table of what was measured."""
    places = Places(layers)
    scales = measured.scales
    ranges = {depth: list(places.range(depth)) for depth in scales.depths}
    return Sensitivity(
        {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "version": version(),
            "source": dict(basis.source),
            "text": dict(basis.text),
            "recipe": sizes.recipe.model_dump(mode="json"),
            "probes": [
                {"weights": one.what, "forms": dict(one.forms), "error": _round(one.error),
                 "kl": _round(one.kl)}
                for one in measured.probes
            ],
            "scales": {
                "kinds": {kind: _round(scale) for kind, scale in scales.kinds.items()},
                "depths": [
                    {"layers": ranges[depth], "factor": _round(factor)}
                    for depth, factor in scales.depths.items()
                ],
            },
            "units": {unit.name: _unit(unit, measured) for unit in sizes.units},
        }
    )  # fmt: skip


def _unit(unit: Unit, measured: Measured) -> dict[str, Any]:
    forms = {}
    for form, nbytes in sorted(unit.sizes.items(), key=lambda pair: (pair[1], pair[0])):
        cost = measured.cost(unit.name, form)
        if cost is not None:
            error = sum(measured.errors[unit.name, form].values())
            forms[form] = {"bytes": nbytes, "error": _round(error), "kl": _round(cost)}
    return {"weights": list(unit.matches), "elements": unit.elements, "forms": forms}


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def read_sensitivity(path: Path) -> Sensitivity:
    """Return the table in a file. RecipeError if it cannot be read or is none."""
    try:
        values = parse_object(path.read_bytes(), path.name)
    except (OSError, FormatError) as error:
        raise RecipeError(f"--sensitivity: {path.name} cannot be read: {error}") from None
    known = values.get("schema"), values.get("schema_version")
    got = f"is {known[0]} {known[1]}" if known != (SCHEMA, SCHEMA_VERSION) else None
    if not _well_formed(values.get("units")):
        got = got or "has a unit without elements, or a kl that is no number of nats"
    if not _has_means(values.get("recipe")):
        got = got or "does not say its recipe"
    if not _has_files(values.get("source")):
        got = got or "does not say of which files it is"
    if got:
        expected = f"{SCHEMA} {SCHEMA_VERSION}, as `qwen35 sensitivity` writes it"
        raise RecipeError(f"--sensitivity: {path.name}", got, expected)
    return Sensitivity(values)


def _means(recipe: Mapping[str, Any]) -> tuple[str, bool]:
    """Return by which method a recipe chooses codes, and whether it has an imatrix."""
    quantize = recipe["quantize"]
    return quantize["method"], quantize["imatrix"] is not None


def _told(means: tuple[str, bool]) -> str:
    return f"method {means[0]}, {'with' if means[1] else 'without'} an imatrix"


def _well_formed(units: object) -> bool:
    """Whether these are units with elements, and forms with a KL that can be one."""
    return isinstance(units, dict) and all(
        isinstance(unit, dict)
        and type(unit.get("elements")) is int
        and isinstance(unit.get("forms"), dict)
        and all(_is_cost(form) for form in unit["forms"].values())
        for unit in units.values()
    )


def _has_means(recipe: object) -> bool:
    quantize = recipe.get("quantize") if isinstance(recipe, dict) else None
    return isinstance(quantize, dict) and {"method", "imatrix"} <= quantize.keys()


def _has_files(source: object) -> bool:
    files = source.get("files") if isinstance(source, dict) else None
    return isinstance(files, dict) and all(
        isinstance(file, dict) and {"size", "sha256"} <= file.keys() for file in files.values()
    )


def _is_cost(form: object) -> bool:
    kl = form.get("kl") if isinstance(form, dict) else None
    return isinstance(kl, int | float) and not isinstance(kl, bool) and 0 <= kl <= MOST


def forms_of(name: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Return the forms to measure for a format: those that were asked for, or the usual ones.

    RecipeError for a form that the format has not.
    """
    known = map(str.lower, kinds.WRITABLE) if FORMATS[name].mixes else (*SCHEMES, KEEP)
    for form in set(asked) - set(known):
        expected = f"a form of a weight in {name}, such as {one_of(FORMS[name][:3])}"
        raise RecipeError("--forms or --sensitivity", f"has {form!r}", expected)
    return tuple(asked) or FORMS[name]
