"""ModelOpt's dialect: `quantization_config` and `hf_quant_config.json`, as its exporter has them.

    one algorithm     quant_algo: NVFP4, and a list of the modules that are not quantised
    several           quant_algo: MIXED_PRECISION, and quantized_layers: {module: algorithm}

Experts of a layer are one module. Engines know the dialect by its producer, so it is named, with
the version whose format this is.

Source: ModelOpt at 0.47, `process_layer_quant_config` and `convert_hf_quant_config_format`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from formats.family.cache_scales import CACHE_ALGORITHM
from formats.quant_methods import MODELOPT

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MIXED = "MIXED_PRECISION"
GROUP_SIZE = 16
EXPERTS = ".experts."
# scheme: the algorithm that reads it
ALGORITHMS = {
    "nvfp4": "NVFP4",
    "nvfp4a16": "W4A16_NVFP4",
    "fp8-tensor": "FP8",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-block": "FP8_PB_WO",
}
WITH_INPUTS = ("NVFP4",)
Block = dict[str, Any]


def modelopt_block(schemes: Mapping[str, str], kept: Sequence[str]) -> Block:
    """Return `quantization_config`.

    schemes  of every quantised module, one of those that are written in this dialect
    kept     full names of the modules that are not quantised
    """
    layers = {holder_of(module): ALGORITHMS[scheme] for module, scheme in schemes.items()}
    algorithms = dict.fromkeys(layers.values())
    if len(algorithms) == 1:
        (algorithm,) = algorithms
        groups, by_layer = [_group(algorithm, ["Linear"])], {}
    else:
        named = sorted(layers.items())
        targets = {one: [name for name, its in named if its == one] for one in algorithms}
        groups, algorithm = [_group(*pair) for pair in targets.items()], MIXED
        by_layer = {"quantized_layers": {name: _layer(one) for name, one in layers.items()}}
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        **by_layer,
        "ignore": list(kept),
        "quant_algo": algorithm,
        "producer": dict(PRODUCER),
        "quant_method": MODELOPT,
    }


def hf_quant_config(block: Mapping[str, Any]) -> Block:
    """Return what ModelOpt's own file says for this `quantization_config`."""
    layers = block.get("quantized_layers")
    sizes = {"group_size": GROUP_SIZE} if layers is None else {"quantized_layers": layers}
    cache = "FP8" if block.get("kv_cache_scheme") else None
    algorithms = {"quant_algo": block["quant_algo"], CACHE_ALGORITHM: cache, **sizes}
    return {
        "producer": block["producer"],
        "quantization": algorithms | {"exclude_modules": block["ignore"]},
    }


def holder_of(module: str) -> str:
    """Return the module that a list of layers names for this one: of an expert, all of them."""
    head, separator, _ = module.partition(EXPERTS)
    return head + EXPERTS.rstrip(".") if separator else module


def _layer(algorithm: str) -> Block:
    return {"quant_algo": algorithm, "group_size": GROUP_SIZE}


def _group(algorithm: str, targets: Sequence[str]) -> Block:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
    inputs = {"input_activations": numbers} if algorithm in WITH_INPUTS else {}
    return {**inputs, "weights": dict(numbers), "targets": list(targets)}
