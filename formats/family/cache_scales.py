"""Scales of an FP8 attention cache: which tensors they are, and whether a config asks for one.

    self_attn.k_scale          compressed-tensors      self_attn.v_scale
    k_proj.k_scale             ModelOpt                v_proj.v_scale
    k_proj.output_scale        compressed-tensors,     v_proj.output_scale
    self_attn.kv_scale         AutoFP8: of both        formerly

A cache that is promised without a scale runs at 1.0, which engines say in their logs at most.

Source: vLLM's `get_cache_scale_mapper`, `BaseKVCacheMethod` and
`get_kv_cache_quant_algo_string` at 0.33; compressed-tensors'
`initialize_attn_qparams` at 0.20.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from formats.family.config import Config
from formats.family.names import normalise
from formats.quant_methods import MODELOPT

ATTENTION = "self_attn"
KEYS, VALUES = "keys", "values"
SCALED = (KEYS, VALUES)
# what follows the name of an attention: what it scales
SPELLINGS: dict[str, tuple[str, ...]] = {
    "k_scale": (KEYS,), "v_scale": (VALUES,),
    "attn.k_scale": (KEYS,), "attn.v_scale": (VALUES,),
    "k_proj.k_scale": (KEYS,), "v_proj.v_scale": (VALUES,),
    "k_proj.output_scale": (KEYS,), "v_proj.output_scale": (VALUES,),
    "kv_scale": SCALED,
}  # fmt: skip
WRITTEN = {KEYS: "k_scale", VALUES: "v_scale"}
# What compressed-tensors calls it, and which fields may be absent.
SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
FIELD = "kv_cache_scheme"
# ModelOpt's name of it, in a file of its own or in config.json, which may stand alone.
CACHE_ALGORITHM = "kv_cache_quant_algo"


def cache_scales(stored: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return stored names by attention (`layers.3.self_attn`) and by what they scale."""
    scales: dict[str, dict[str, str]] = {}
    for name in stored:
        before, _, spelling = normalise(name).rpartition(f".{ATTENTION}.")
        for what in SPELLINGS.get(spelling, ()):
            scales.setdefault(f"{before}.{ATTENTION}", {})[what] = name
    return scales


def is_fp8_scheme(scheme: object) -> bool:
    """Whether a `kv_cache_scheme` means E4M3 with one scale for all keys of a layer."""
    if not isinstance(scheme, Mapping) or "num_bits" not in scheme or "type" not in scheme:
        return False
    return all(scheme.get(field) in (None, value) for field, value in SCHEME.items())


def has_fp8_cache(config: Config) -> bool:
    """Whether the config asks engines for such a cache."""
    block = config.quantization or {}
    scheme = block.get(FIELD)
    if block.get("quant_method") == MODELOPT and not scheme:
        return bool(block.get(CACHE_ALGORITHM) == "FP8")
    return is_fp8_scheme(scheme)


def attentions(config: Config, mtp_layers: int = 0) -> list[str]:
    """Return the attentions of the decoder layers, then those of so many layers of the MTP head.

    The MTP head's cache is that of a draft model.
    """
    kinds = enumerate(config.layer_types)
    layers = [f"layers.{i}" for i, kind in kinds if kind == "full_attention"]
    layers += [f"mtp.layers.{i}" for i in range(mtp_layers)]
    return [f"{layer}.{ATTENTION}" for layer in layers]


def cached_in_fp8(config: Config) -> list[str]:
    """Return the attentions whose cache is to be FP8."""
    return attentions(config) if has_fp8_cache(config) else []
