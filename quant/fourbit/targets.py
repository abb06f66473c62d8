"""What compressed-tensors' config_groups say of a module, found as engines find it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CLASS = "Linear"


def group_of(module: str, groups: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the group an engine takes: by the module's name, then by a pattern, then by class."""
    listed = [(t, name) for name, group in groups.items() for t in group["targets"]]
    exact = (name for target, name in listed if target == module)
    patterns = (
        name
        for target, name in listed
        if target.startswith("re:") and re.match(target.removeprefix("re:"), module)
    )
    classes = (name for target, name in listed if target == CLASS)
    return next((name for way in (exact, patterns, classes) for name in way), None)


def bits_of(module: str, block: Mapping[str, Any]) -> int | None:
    """Return the bits of a module's weight by a config block; None if it does not say them.

    A block that is misshapen says nothing here: what is wrong with it is said elsewhere.
    """
    groups = block.get("config_groups")
    if not isinstance(groups, dict):
        return None
    bits: dict[str, int] = {
        name: group["weights"]["num_bits"] for name, group in groups.items() if _says(group)
    }
    if len({*bits.values()}) == 1:
        return next(iter(bits.values()))
    name = group_of(module, {name: groups[name] for name in bits})
    return bits[name] if name else None


def _says(group: Any) -> bool:
    """Whether a group has the shape of one, and bits."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        return False
    targets = group.get("targets")
    named = isinstance(targets, list) and all(isinstance(t, str) for t in targets)
    return named and type(group["weights"].get("num_bits")) is int
