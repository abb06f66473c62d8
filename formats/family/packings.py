"""What a quantization_config says of packed weights: which layout, how many bits, which groups.

    gptq        checkpoint_format: gptq (zeros less one), gptq_v2 (zeros as they are)
    awq         version: gemm
    auto-round  packing_format: one of these, or compressed-tensors'

Modules may differ: `dynamic` has patterns (GPTQ; `-:` in front says that a module is left alone),
`extra_config` has names or patterns (AutoRound). The first one that fits counts.

Source: gptqmodel at 7.7, AutoRound at 0.16, AutoAWQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from formats.nearest import one_of

if TYPE_CHECKING:
    from collections.abc import Mapping

GPTQ, GPTQ_V2, AWQ, COMPRESSED = "GPTQ", "GPTQ v2", "AWQ", "compressed-tensors"
LEFT_ALONE = "-:"
MARKS = re.compile(r"[+-]:")
BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a method says its layout.

    fields   that say it; the first one that is there counts
    usual    what it is without any
    layouts  by what the field says
    bits     that are read
    """

    fields: tuple[str, ...]
    usual: str
    layouts: dict[str, str] = field(hash=False)
    bits: tuple[int, ...] = BITS


_AUTO_ROUND = Packing(
    ("packing_format",),
    "auto_round:auto_gptq",
    {
        "auto_round:auto_gptq": GPTQ,
        "auto_round": GPTQ_V2,
        "auto_round:gptqmodel": GPTQ_V2,
        "auto_round:auto_awq": AWQ,
        "auto_round:llm_compressor": COMPRESSED,
    },
)
PACKINGS: dict[str, Packing] = {
    "gptq": Packing(("checkpoint_format", "format"), "gptq", {"gptq": GPTQ, "gptq_v2": GPTQ_V2}),
    "awq": Packing(("version", "checkpoint_format", "format"), "gemm", {"gemm": AWQ}, (4,)),
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
}


def layout_of(block: Mapping[str, Any]) -> str | None:
    """Return the layout that a block says; None if its method has none, or it is not known."""
    packing = PACKINGS.get(str(block.get("quant_method")))
    return packing.layouts.get(_said(packing, block)[1]) if packing else None


def odd_packing(block: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a block says that nobody here reads, and what is expected; None if all is well.

    >>> odd_packing({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})
    ("checkpoint_format is 'marlin'", 'gptq or gptq_v2')
    """
    packing = PACKINGS.get(str(block.get("quant_method")))
    if packing is None:
        return None
    name, layout = _said(packing, block)
    if layout not in packing.layouts:
        return f"{name} is {layout!r:.80}", one_of(packing.layouts)
    if block.get("is_marlin_format"):
        return "is_marlin_format is true", "weights that are not repacked for one kernel"
    bits = _bits(block)
    if bits is not None and bits not in packing.bits:
        return f"bits is {bits!r:.80}", one_of(packing.bits)
    return None


def _said(packing: Packing, block: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field that says the layout, and what it says."""
    stated = ((name, block[name]) for name in packing.fields if block.get(name) is not None)
    name, layout = next(stated, (packing.fields[0], packing.usual))
    return name, str(layout).lower()


def left_alone(module: str, dynamic: object) -> bool:
    """Whether GPTQ's rules say that a module is not quantised."""
    rule = _rule_of(module, dynamic)
    return rule is not None and rule[0].startswith(LEFT_ALONE)


def promised(module: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return bits, group_size, desc_act and sym of a module; only what is said."""
    stated: dict[str, Any] = {
        "bits": _bits(block),
        "group_size": block.get("group_size", block.get("q_group_size")),
        "desc_act": block.get("desc_act"),
        "sym": block.get("sym"),
    }
    for overrides in (block.get("dynamic"), block.get("extra_config")):
        rule = _rule_of(module, overrides)
        if rule is not None and isinstance(rule[1], dict):
            stated |= {key: value for key, value in rule[1].items() if key in stated}
    return {key: value for key, value in stated.items() if value is not None}


def _bits(block: Mapping[str, Any]) -> object:
    return block.get("bits", block.get("w_bit"))


def _rule_of(module: str, rules: object) -> tuple[str, Any] | None:
    """Return the first rule that is a name, or whose pattern fits from its beginning."""
    if not isinstance(rules, dict):
        return None
    return next(((key, rules[key]) for key in rules if _fits(str(key), module)), None)


def _fits(key: str, module: str) -> bool:
    pattern = key[2:] if MARKS.match(key) else key
    try:
        return key == module or re.match(pattern, module) is not None
    except re.error:
        return False
