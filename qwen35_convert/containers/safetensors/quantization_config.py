"""`quantization_config` as engines read it, made from the tensors that are written.

Two dialects: the official Qwen one (`quant_method: fp8`, 128x128 blocks) and compressed-tensors
(`float-quantized`), which also takes channels and mixtures. Both list what is *not* quantised.
vLLM compares that list by whole names, transformers by prefix or suffix at a module boundary,
SGLang by dotted substring; so it holds full exact names in the artifact's own namespace, one for
every weight with two axes or more, MTP included, and nothing that is not there: `mlp.gate` in a
dense model would swallow `mlp.gate_proj` in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.family.layout import Atom
from formats.stored import KEEP
from quant.scheme import Scheme

Written = tuple[Atom, Scheme, str]
COMPRESSED_TENSORS_VERSION = "0.19.0"
GROUP_NAMES = {"fp8-block": "FP8_BLOCK", "fp8-channel": "FP8_DYNAMIC"}


def quantization_config(written: Sequence[Written], *, tied: bool) -> dict[str, Any]:
    """Return the block for what is written: (atom, scheme, stored name of its weight)."""
    used = {scheme.name: scheme for _, scheme, _ in written if scheme.name != KEEP}
    schemes = [used[name] for name in sorted(used)]
    kept = unquantised_modules(written, tied=tied)
    own = schemes[0].config_block(kept) if len(schemes) == 1 else None
    if own is not None:
        return own
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "version": COMPRESSED_TENSORS_VERSION,
        "config_groups": dict(_group(written, one, alone=len(schemes) == 1) for one in schemes),
        "ignore": kept,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(
    written: Sequence[Written], scheme: Scheme, *, alone: bool
) -> tuple[str, dict[str, Any] | None]:
    targets = [module_of(stored) for _, used, stored in written if used.name == scheme.name]
    entry = scheme.config_entry(["Linear"] if alone else list(dict.fromkeys(targets)))
    return GROUP_NAMES.get(scheme.name, scheme.name), entry


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
        if atom.role == "expert":
            names.append(stored[: stored.index(".experts.")] + ".experts")
        names.append(module_of(stored))
    return list(dict.fromkeys(names))
