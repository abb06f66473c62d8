"""What is refused of a config.json before its sizes are used, or once they are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from formats.errors import FormatError
from formats.family.config_fields import (
    ABSENT,
    HARD_WIRED,
    MAX_EXPERTS,
    MAX_LAYERS,
    MULTIPLES,
    OUTER_TYPES,
    TEXT_TYPES,
    Fields,
    Group,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def check_present(groups: Iterable[Group], text: Mapping[str, Any], prefix: str) -> None:
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


def is_moe(raw: dict[str, Any], text: dict[str, Any]) -> bool:
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


def check_hard_wired(text: dict[str, Any], prefix: str) -> None:
    """Refuse a config that asks for what the architecture does not have."""
    for field, accepted, meaning in HARD_WIRED:
        value = text.get(field)
        known = any(type(value) is type(good) and value == good for good in accepted)
        if value is not None and not known:
            raise FormatError(
                f"config.json: {prefix}{field} is {value!r:.120}, expected {accepted[0]!r}\n"
                f"  why   {meaning} is not part of the Qwen3.5 family"
            )


def check_sizes(sizes: Mapping[str, int], fields: Mapping[str, str], layers: int) -> None:
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


def _lost(fields: Mapping[str, str]) -> str:
    """Name every field whose default was taken."""
    names = [field.removesuffix(ABSENT) for field in fields.values() if field.endswith(ABSENT)]
    return f"add {', '.join(names)}, as the config.json of the original model has them"
