r"""The rules of GPTQ's config for what is not quantised: `-:.*layers\.\d+\.mlp\.gate$`.

gptqmodel takes every linear for quantised that no rule names, vLLM every expert, of which it asks
by the module that holds them all. Both match from the beginning of their own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from formats.family.names import PARTS, normalise, part_of
from formats.family.packings import LEFT_ALONE
from qwen35_convert.containers.safetensors.target_patterns import target_patterns

EXPERTS = ".experts."
TRUNK, MTP, HEAD = "trunk", "mtp", "lm_head"


def with_rules(
    block: dict[str, Any], kept: Sequence[str], quantised: Sequence[str]
) -> dict[str, Any]:
    """Return the block with rules for modules that are kept, and none for those that are not."""
    held = dict.fromkeys(f"{m.partition(EXPERTS)[0]}.experts" for m in quantised if EXPERTS in m)
    patterns = _patterns(kept, [*quantised, *held])
    rules = dict.fromkeys(f"{LEFT_ALONE}.*{pattern}" for pattern in patterns)
    return block | {"lm_head": HEAD in quantised, "dynamic": {rule: {} for rule in rules}}


def _patterns(kept: Sequence[str], quantised: Sequence[str]) -> Iterable[str]:
    mixed = {part_of(normalise(module)) for module in quantised}
    for part in (TRUNK, *PARTS):
        own = _of_part(part, kept)
        if part in PARTS and own and part not in mixed:
            yield rf"{part}\."  # all of it
            continue
        groups = {"kept": own, "quantised": _of_part(part, quantised)}
        # layers of MTP have the names of others, behind its own
        before = {TRUNK: r"(?<!mtp\.)" if MTP in mixed else "", MTP: r"mtp\."}.get(part, "")
        for pattern in target_patterns(groups)["kept"]:
            inner = pattern.removeprefix("re:.*")
            yield (before if inner.startswith("layers") else "") + inner


def _of_part(part: str, modules: Sequence[str]) -> list[str]:
    return [module for module in modules if part_of(normalise(module)) == part]
