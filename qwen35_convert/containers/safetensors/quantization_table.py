"""What engines read of quantization_config: the values a field may have, and what nobody obeys.

A field that no table names must be absent or mean nothing: an engine may obey it.

Sources: vLLM's `Fp8Config` and `CompressedTensorsConfig` at 0.33, transformers'
`FineGrainedFP8Config` and `CompressedTensorsConfig` at 5.24, compressed-tensors'
`QuantizationConfig`, `QuantizationScheme` and `QuantizationArgs` at 0.20.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from formats.quant_methods import COMPRESSED, FP8, MODELOPT
from qwen35_convert.difference import same

Row = tuple[tuple[Any, ...], str]
"""Values that are right, and what is said of any other. Absence is right but for `NEEDED`."""

# Who wrote the block, and how well it packed.
RECORDS = frozenset(
    {"version", "producer", "provider", "quant_library", "global_compression_ratio"}
)
# Of these, what compressed-tensors takes, which refuses the block for any other.
RECORD_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "global_compression_ratio": ((int, float, type(None)), "a number, or null"),
}
# Where the engines of a method look for the list of modules that are not quantised.
LISTS: dict[str, tuple[str, ...]] = {
    FP8: ("modules_to_not_convert", "ignored_layers"),
    COMPRESSED: ("ignore",),
    MODELOPT: ("ignore", "exclude_modules"),
}
# What is held against the stored tensors by more than one field.
JUDGED: dict[str, frozenset[str]] = {
    FP8: frozenset({"quant_method", "weight_block_size", "scale_fmt", "activation_scheme"}),
    COMPRESSED: frozenset(
        {"quant_method", "config_groups", "format", "sparsity_config", "kv_cache_scheme"}
    ),
    MODELOPT: frozenset(
        {"quant_method", "quant_algo", "config_groups", "quantized_layers", "group_size"}
        | {"kv_cache_scheme", "kv_cache_quant_algo"}
    ),
}
# By method: the field that promises scales of activations, what it is without any, what is said.
ACTIVATIONS: dict[str, tuple[str, str | None, str]] = {
    FP8: (
        "activation_scheme",
        "dynamic",
        "but no scales of inputs are stored, expected 'dynamic'",
    ),
    COMPRESSED: (
        "kv_cache_scheme",
        None,
        "but no scales of keys and values are stored, expected null",
    ),
}
USED = "but the codes that are stored are to be used, expected false"
FIELDS: dict[str, dict[str, Row]] = {
    FP8: {
        "fmt": ((None, "e4m3"), "but E4M3 codes are stored"),
        "activation_scheme": (("dynamic", "static"), "which vLLM needs, expected 'dynamic'"),
        "expert_dtype": (("fp8",), "but FP8 experts are stored"),
        "dequantize": ((None, False), USED),
    },
    COMPRESSED: {
        "quantization_status": (("compressed",), "but codes are stored, expected 'compressed'"),
        "run_compressed": (
            (None, True),
            "but the codes that are stored are to be used, expected true",
        ),
        "dequantize": ((None, False), USED),
    },
    MODELOPT: {},
}
# What must be there: without it transformers 5.24 takes the codes for values (measured: NaN).
# Without what it is of FP8, vLLM refuses the config.
NEEDED: dict[str, tuple[str, ...]] = {
    COMPRESSED: ("quantization_status",),
    FP8: ("activation_scheme",),
}
UNKNOWN: Row = ((None, False, 0, [], ""), "which an engine may obey, expected it to be absent")
# Of sparsity_config: no zeros are left out.
DENSE = "dense"
# Of a group.
GROUP_JUDGED = frozenset({"targets", "weights", "input_activations", "format"})
GROUP_FIELDS: dict[str, Row] = {
    "output_activations": ((None,), "but engines round no outputs of these, expected null"),
}
# Of weights or inputs: how their scales were looked for; nothing is asymmetric.
ARGS_RECORDS = frozenset({"observer", "observer_kwargs", "zp_dtype"})
# Of a cache. SGLang ignores scales of heads; compressed-tensors takes no null for a flag.
_STATIC = "but engines take one static scale for all keys of a layer"
CACHE_FIELDS: dict[str, Row] = {
    "num_bits": ((8,), "but engines cache keys and values in FP8, expected 8"),
    "type": (("float",), "but engines cache keys and values in FP8, expected 'float'"),
    "strategy": ((None, "tensor", "attn_head"), f"{_STATIC}, expected 'tensor'"),
    "symmetric": ((True,), "but engines cache without zero points, expected true"),
    "dynamic": ((False,), f"{_STATIC}, expected false"),
    "scale_dtype": ((None, "torch.bfloat16", "torch.float16", "torch.float32"), _STATIC),
}
# Of ModelOpt, whose cache may be NVFP4.
MODELOPT_CACHE_FIELDS: dict[str, Row] = {
    "num_bits": ((8, 4), "but engines cache keys and values in FP8 or NVFP4, expected 8 or 4"),
    "group_size": ((None, 16), "but a group of NVFP4 has 16, expected 16"),
}
# What an absent field means.
ARGS_DEFAULTS: dict[str, Any] = {
    "symmetric": True,
    "dynamic": False,
    "num_bits": 8,
    "type": "int",
    "strategy": "tensor",
    "group_size": None,
    "block_structure": None,
    "actorder": None,
    "scale_dtype": None,
}
# (field, expected value, what means the same)
ARGS_ALIKE: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("group_size", None, (-1,)),
    ("actorder", None, (False, "weight", "static")),
    ("actorder", "group", (True, "dynamic")),
    ("scale_dtype", None, ("torch.bfloat16", "torch.float16", "torch.float32")),
    ("scale_dtype", "torch.float8_e4m3fn", (None,)),
    ("block_structure", [128, 128], ("128x128",)),
)
# What else is right of inputs whose expected strategy is this: codes and scales are the same.
INPUT_STRATEGIES: dict[str, tuple[str, ...]] = {"group": ("token",)}
# Formats that store the same as another.
FORMATS_ALIKE: dict[str, tuple[str, ...]] = {"float-quantized": ("naive-quantized",)}
MIXED = "mixed-precision"


def odd_rows(
    block: Mapping[str, Any], table: Mapping[str, Row], skipped: Collection[str]
) -> Iterator[str]:
    """Yield the fields that say what no row allows."""
    for field, value in block.items():
        right, why = table.get(field, UNKNOWN)
        if field not in skipped and not _means_one_of(value, right):
            yield f"{field} is {value!r:.120}, {why}"


def _means_one_of(value: Any, right: tuple[Any, ...]) -> bool:
    """Whether a value is one of these; of what is not known, also an object of such."""
    if isinstance(value, dict) and right is UNKNOWN[0]:
        return all(_means_one_of(inner, right) for inner in value.values())
    return any(same(value, one) for one in right)
