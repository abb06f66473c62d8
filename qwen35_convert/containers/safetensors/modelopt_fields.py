"""ModelOpt's fields, held against the codes and scales that are stored.

An engine takes one algorithm for a module: that of the whole, or, of MIXED_PRECISION, what
`quantized_layers` says of it. It then looks for that algorithm's tensors, and for no others.

Source: vLLM's `ModelOptNvFp4Config` and `ModelOptMixedPrecisionConfig` at 0.33.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import CACHE_ALGORITHM, FIELD
from formats.family.layout import Atom
from formats.json_file import read_object
from formats.nearest import one_of
from formats.safetensors.hf_quant import HF_QUANT, quantization_of
from formats.safetensors.methods import BLOCK
from formats.side_names import CONFIG
from qwen35_convert.containers.safetensors.modelopt import (
    ALGORITHMS,
    GROUP_SIZE,
    MIXED,
    holder_of,
)
from qwen35_convert.difference import same
from qwen35_convert.failure import Failure

# algorithm: the scale of inputs that it reads for every module, and what is stored without one
INPUTS = {"NVFP4": ("input_scale", "nvfp4a16"), "FP8": ("input_scale", "fp8-tensor")}
# Of a group in config.json, and how many bits the codes of a scheme have.
NUMBERS = ("weights", "input_activations")
BITS = {scheme: 4 if scheme.startswith("nvfp4") else 8 for scheme in ALGORITHMS}
SAME = {"FP8_BLOCK_SCALES": "FP8_PB_WO"}
# In which numbers engines may cache keys and values, by either file. Without scales they do so at
# one of 1, as ModelOpt's exporter means it where it calibrates no cache.
CACHES = (None, "FP8", "NVFP4")
CACHE_BITS = {8: "FP8", 4: "NVFP4"}
LISTED = "exclude_modules"
# What both files say: the field, and what its absence means.
SHARED: dict[str, Any] = {"quant_algo": None, "quantized_layers": {}, "group_size": GROUP_SIZE}


def modelopt_problems(
    block: Mapping[str, Any], quantized: Mapping[str, Atom], scaled: Collection[str]
) -> Iterator[Failure]:
    """Yield what is wrong with the block for these modules.

    scaled  the modules whose inputs have a scale beside the weight's parts
    """
    said = (*_group_sizes(block), *_groups(block, quantized), *_cache(block))
    yield from (Failure(CONFIG, f"{BLOCK}: {problem}") for problem in said)
    seen = set()
    for module, atom in quantized.items():
        got, expected = algorithm_of(module, block), ALGORITHMS.get(atom.scheme)
        got = SAME.get(str(got), got)
        inputs, without = INPUTS.get(str(got), ("", ""))
        if atom.scheme == without and module not in scaled:
            yield Failure(f"{module}.{inputs}", f"is missing: engines read it for {got}")
        elif got != expected and (got, atom.scheme) not in seen:
            seen.add((got, atom.scheme))
            problem = f"the algorithm of {module} is {got!r}, but {atom.scheme} is stored"
            yield Failure(CONFIG, f"{BLOCK}: {problem}, expected {expected!r}")
    for name in _layers(block):
        if not _covers(name, quantized):
            yield Failure(name, "is in quantized_layers, but no such module is quantised")


def _cache(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield what one of the two files says of a cache that no engine has."""
    if block.get(CACHE_ALGORITHM) not in CACHES:
        expected = f"{one_of(map(repr, CACHES[1:]))} or null"
        yield f"{CACHE_ALGORITHM} is {block[CACHE_ALGORITHM]!r:.120}, expected {expected}"


def _other_cache(own: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[str]:
    """Yield a cache that ModelOpt's own file promises, and config.json does not.

    TensorRT-LLM then caches in other numbers than vLLM. Its exporter says the same in both.
    """
    promised, scheme = own.get(CACHE_ALGORITHM), block.get(FIELD)
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    stated = block.get(CACHE_ALGORITHM) or (CACHE_BITS.get(bits) if type(bits) is int else None)
    if promised in CACHES[1:] and promised != stated:
        other = f"{stated!r}" if stated else f"neither {FIELD} nor {CACHE_ALGORITHM}"
        yield f"{CACHE_ALGORITHM} is {promised!r}, but config.json says {other}"


def algorithm_of(module: str, block: Mapping[str, Any]) -> object:
    """Return the algorithm that an engine takes for a module; None: it is not quantised."""
    algorithm = block.get("quant_algo")
    if algorithm != MIXED:
        return algorithm
    layers = _layers(block)
    entry = layers.get(module, layers.get(holder_of(module)))
    return entry.get("quant_algo") if isinstance(entry, dict) else None


def _layers(block: Mapping[str, Any]) -> Mapping[str, Any]:
    layers = block.get("quantized_layers")
    return layers if block.get("quant_algo") == MIXED and isinstance(layers, dict) else {}


def _covers(name: str, quantized: Mapping[str, Atom]) -> bool:
    return name in quantized or any(holder_of(module) == name for module in quantized)


def _groups(block: Mapping[str, Any], quantized: Mapping[str, Atom]) -> Iterator[str]:
    """Yield what groups say of their numbers that nothing stored is."""
    groups = block.get("config_groups")
    if not isinstance(groups, dict):
        if groups is not None:
            yield f"config_groups is {groups!r:.120}, expected an object"
        return
    bits = {BITS[atom.scheme] for atom in quantized.values() if atom.scheme in BITS}
    for name, group in groups.items():
        where = f"config_groups.{name}"
        for part in NUMBERS if isinstance(group, dict) else ():
            numbers = group.get(part)
            if isinstance(numbers, dict):
                yield from _numbers(numbers, bits, f"{where}.{part}")
            elif numbers is not None:
                yield f"{where}.{part} is {numbers!r:.120}, expected an object"
        if not isinstance(group, dict):
            yield f"{where} is {group!r:.120}, expected an object"


def _numbers(numbers: Mapping[str, Any], bits: Collection[int], where: str) -> Iterator[str]:
    said, kind = numbers.get("num_bits"), numbers.get("type")
    if said is not None and not any(same(said, one) for one in bits):
        expected = " or ".join(map(str, sorted(bits)))
        yield f"{where}.num_bits is {said!r:.120}, expected {expected}"
    if kind not in (None, "float"):
        yield f"{where}.type is {kind!r:.120}, expected 'float'"
    if where.endswith(NUMBERS[0]) and numbers.get("dynamic") not in (None, False):
        yield f"{where}.dynamic is {numbers['dynamic']!r:.120}, expected false"


def _group_sizes(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of groups that are not NVFP4's, wherever an engine looks for one."""
    groups = block.get("config_groups")
    every = groups.values() if isinstance(groups, dict) else ()
    parts = [group.get("weights") for group in every if isinstance(group, dict)]
    for part in (block, *parts, *_layers(block).values()):
        size = part.get("group_size") if isinstance(part, dict) else None
        if size not in (None, 0, GROUP_SIZE):
            yield f"group_size is {size!r:.120}, expected {GROUP_SIZE}"


def own_file(artifact: Checkpoint) -> dict[str, Any] | None:
    """Return what ModelOpt's own file says; None if there is none, or it says nothing."""
    path = artifact.folder / HF_QUANT
    return quantization_of(lambda: read_object(path)) if path.is_file() else None


def file_problems(artifact: Checkpoint, block: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield what ModelOpt's own file says otherwise than config.json: engines read either.

    Its list of modules is judged by itself.
    """
    own = own_file(artifact)
    if own is None and (artifact.folder / HF_QUANT).is_file():
        yield Failure(HF_QUANT, "says nothing of a quantisation, but engines read it")
    for problem in (*_cache(own or {}), *_other_cache(own or {}, block)):
        yield Failure(HF_QUANT, problem)
    listed = (own or {}).get(LISTED)
    if not isinstance(listed, list | None):
        yield Failure(HF_QUANT, f"{LISTED} is {listed!r:.120}, expected a list of modules")
    for field, usual in SHARED.items() if own is not None else ():
        got, expected = (one.get(field) or usual for one in (own or {}, block))
        if got != expected:
            problem = f"{field} is {got!r:.120}, but config.json says {expected!r:.120}"
            yield Failure(HF_QUANT, problem)
