"""`quantization_config` as engines read it, made from the tensors that are written.

The official Qwen dialect (`quant_method: fp8`, 128x128 blocks), compressed-tensors, which takes
everything, ModelOpt's (`modelopt`), and GPTQ's, which has rules (`gptq_rules`). The first three
list what is *not* quantised.
vLLM compares that list by whole names, transformers by prefix or suffix at a module boundary,
SGLang by dotted substring; so it holds full exact names in the artifact's own namespace, one for
every weight with two axes or more, MTP included, and nothing that is not there: `mlp.gate` in a
dense model would swallow `mlp.gate_proj` in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.family.cache_scales import FIELD, SCHEME
from formats.family.layout import Atom
from formats.family.roles import EXPERT
from formats.quant_methods import COMPRESSED, GPTQ, MODELOPT
from formats.stored import KEEP
from quant.scheme import Scheme
from qwen35_convert.containers.safetensors.gptq_rules import with_rules
from qwen35_convert.containers.safetensors.modelopt import modelopt_block
from qwen35_convert.containers.safetensors.target_patterns import target_patterns

Written = tuple[Atom, Scheme, str]
COMPRESSED_TENSORS_VERSION = "0.19.0"
# What engines take for the whole of an artifact by a module's class; others go by patterns alone:
# with `Linear` beside patterns they take a fused layer for the class before they look at its parts.
FLOAT = "float-quantized"
MIXED = "mixed-precision"
GROUP_NAMES = {"fp8-block": "FP8_BLOCK", "fp8-channel": "FP8_DYNAMIC"}


def quantization_config(
    written: Sequence[Written], *, tied: bool, fp8_cache: bool = False
) -> dict[str, Any]:
    """Return the block for what is written: (atom, scheme, stored name of its weight).

    fp8_cache  whether scales of keys and values are written, which compressed-tensors alone names
    """
    used = {scheme.name: scheme for _, scheme, _ in written if scheme.name != KEEP}
    schemes = [used[name] for name in sorted(used)]
    kept = unquantised_modules(written, tied=tied)
    if any(scheme.dialect == MODELOPT for scheme in schemes):
        quantised = [(module_of(name), one.name) for _, one, name in written if one.name != KEEP]
        return modelopt_block(dict(quantised), kept)
    own = schemes[0].config_block(kept) if len(schemes) == 1 else None
    if own is not None and own["quant_method"] == GPTQ:
        return with_rules(own, kept, [module_of(name) for _, s, name in written if s.name != KEEP])
    if own is not None and not fp8_cache:
        return own
    groups = dict(_group(written, one, alone=len(schemes) == 1) for one in schemes)
    formats = {entry.get("format", FLOAT) for entry in groups.values() if entry}
    if formats != {FLOAT}:
        _target_by_pattern(groups, written)
    return {
        "quant_method": COMPRESSED,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "version": COMPRESSED_TENSORS_VERSION,
        "config_groups": groups,
        "ignore": kept,
        FIELD: dict(SCHEME) if fp8_cache else None,
        "global_compression_ratio": None,
    }


def _group(
    written: Sequence[Written], scheme: Scheme, *, alone: bool
) -> tuple[str, dict[str, Any] | None]:
    targets = [module_of(stored) for _, used, stored in written if used.name == scheme.name]
    entry = scheme.config_entry(["Linear"] if alone else list(dict.fromkeys(targets)))
    return _group_name(scheme), entry


def _group_name(scheme: Scheme) -> str:
    return GROUP_NAMES.get(scheme.name, scheme.name)


def _target_by_pattern(groups: dict[str, Any], written: Sequence[Written]) -> None:
    """Give each group patterns that name its modules, and no other group's."""
    by_group: dict[str, list[str]] = {}
    for _, scheme, stored in written:
        if scheme.name != KEEP:
            by_group.setdefault(_group_name(scheme), []).append(module_of(stored))
    for name, patterns in target_patterns(by_group).items():
        groups[name]["targets"] = patterns


def module_of(stored: str) -> str:
    """Return the module that owns a weight: its name without `.weight`."""
    return stored.removesuffix(".weight")


def unquantised_modules(written: Sequence[Written], *, tied: bool) -> list[str]:
    """Return the full names of all modules with an unquantised weight of two axes or more.

    Experts that stay unquantised are also named by the module that holds them all, which is what
    engines that fuse experts look for.
    """
    names = ["lm_head"] if tied else []
    for atom, scheme, stored in written:
        if scheme.name != KEEP or len(atom.shape) < 2:
            continue
        if atom.role == EXPERT:
            names.append(stored[: stored.index(".experts.")] + ".experts")
        names.append(module_of(stored))
    return list(dict.fromkeys(names))
