"""Faults in compressed-tensors' config_groups and in what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.planted.fault import Fault, in_outputs
from tests.planted.quantization_faults import COMPRESSED, Change, block_fault, put


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for table, where in ((GROUPS, COMPRESSED), (MORE, COMPRESSED)):
        for name, (wanted, change) in table.items():
            yield block_fault(name, wanted, change, where)
    for name, (wanted, change) in TWO_GROUPS.items():
        yield block_fault(name, wanted, change, in_outputs("mixed"))


def groups(part: str, field: str, value: Any) -> Change:
    """Return a change of a field in every group's weights, activations or own fields."""

    def change(block: dict[str, Any]) -> None:
        for group in block["config_groups"].values():
            (group[part] if part else group)[field] = value

    return change


def _swap_targets(block: dict[str, Any]) -> None:
    one, two = block["config_groups"].values()
    one["targets"], two["targets"] = two["targets"], one["targets"]


def _lose_group(block: dict[str, Any]) -> None:
    block["config_groups"].popitem()


def _lose_target(block: dict[str, Any]) -> None:
    next(iter(block["config_groups"].values()))["targets"].pop(0)


def _no_formats(block: dict[str, Any]) -> None:
    groups("", "format", None)(block)
    del block["format"]


def _rename_list(block: dict[str, Any]) -> None:
    block["modules_to_not_convert"] = block.pop("ignore")


# name: (what must be named, change)
GROUPS: dict[str, tuple[str, Change]] = {
    "targets-embedding": ("targets", groups("", "targets", ["Embedding"])),
    "strategy-tensor": ("strategy", groups("weights", "strategy", "tensor")),
    "strategy-group": ("strategy", groups("weights", "strategy", "group")),
    "bits-4": ("num_bits", groups("weights", "num_bits", 4)),
    "type-int": ("type", groups("weights", "type", "int")),
    "weights-not-symmetric": ("symmetric", groups("weights", "symmetric", False)),
    "weights-dynamic": ("dynamic", groups("weights", "dynamic", True)),
    "activations-not-dynamic": ("dynamic", groups("input_activations", "dynamic", False)),
    "activations-of-4-bits": ("num_bits", groups("input_activations", "num_bits", 4)),
    "activations-per-tensor": ("strategy", groups("input_activations", "strategy", "tensor")),
    "activations-empty": ("input_activations", groups("", "input_activations", {})),
    "output-activations": (
        "output_activations",
        groups(
            "",
            "output_activations",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
    ),
    "format-int": ("format", put("format", "int-quantized")),
    "format-packed": ("format", put("format", "pack-quantized")),
    "status-frozen": ("quantization_status", put("quantization_status", "frozen")),
    "kv-cache": (
        "kv_cache_scheme",
        put(
            "kv_cache_scheme",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
    ),
    "no-groups": ("config_groups", lambda block: block["config_groups"].clear()),
    "transforms": (
        "transform_config",
        put("transform_config", {"config_groups": {"u": {"type": "hadamard", "apply": []}}}),
    ),
    "method-fp8": ("quant_method|weight_scale|128x128", put("quant_method", "fp8")),
}
TWO_GROUPS: dict[str, tuple[str, Change]] = {
    "targets-of-the-other-group": ("out_proj|in_proj_qkv|targets", _swap_targets),
    "a-group-lost": ("out_proj|config_groups", _lose_group),
    "a-target-lost": ("in_proj_qkv|targets", _lose_target),
    "targets-all-linear": ("targets|out_proj", groups("", "targets", ["Linear"])),
}
MORE: dict[str, tuple[str, Change]] = {
    "format-of-a-group": ("format", groups("", "format", "pack-quantized")),
    "no-format": ("format", _no_formats),
    "status-decompressed": ("quantization_status", put("quantization_status", "decompressed")),
    "status-missing": (
        "quantization_status",
        lambda block: block.pop("quantization_status"),
    ),
    "not-run-compressed": ("run_compressed", put("run_compressed", False)),
    "dequantized": ("dequantize", put("dequantize", True)),
    "zeros-left-out": (
        "sparsity_config",
        put("sparsity_config", {"format": "sparse-24-bitmask", "targets": ["Linear"]}),
    ),
    "experts-pruned": ("moe_sparsity_config", put("moe_sparsity_config", {"method": "prune"})),
    "packed-otherwise": ("packing_format", put("packing_format", "auto_round")),
    "list-under-another-name": ("in_proj_a|modules_to_not_convert", _rename_list),
    "weights-in-groups": ("group_size", groups("weights", "group_size", 128)),
    "weights-reordered": ("actorder", groups("weights", "actorder", "group")),
    "weights-of-no-strategy": ("strategy", groups("weights", "strategy", None)),
    "bits-null": ("num_bits", groups("weights", "num_bits", None)),
    "weights-as-text": ("weights", groups("", "weights", "fp8")),
    "no-weights": ("weights", groups("", "weights", None)),
    "scales-in-fp8": ("scale_dtype", groups("weights", "scale_dtype", "torch.float8_e4m3fn")),
    "activations-of-integers": ("type", groups("input_activations", "type", "int")),
    "activations-not-symmetric": ("symmetric", groups("input_activations", "symmetric", False)),
    "activations-local": ("dynamic", groups("input_activations", "dynamic", "local")),
    "activations-as-text": ("input_activations", groups("", "input_activations", "fp8")),
    "targets-of-numbers": ("targets", groups("", "targets", [5])),
    "targets-as-text": ("targets", groups("", "targets", "Linear")),
    "a-group-as-a-list": (
        "config_groups",
        lambda block: block["config_groups"].update(FP8_DYNAMIC=["Linear"]),
    ),
    "compression-as-text": ("global_compression_ratio", put("global_compression_ratio", "x")),
    "a-group-s-unknown-field": ("rotation", groups("", "rotation", "hadamard")),
}
