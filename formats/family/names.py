"""Namespaces: what precedes a tensor's name in the wild, and what we refuse by name.

    hub    model.language_model.layers.0...   model.visual...   lm_head   mtp...
    text   model.layers.0...                                    lm_head   mtp...
    wild   model.language_model.language_model.language_model.layers.0...   (transformers 5.0-5.5)
           model.language_model.visual...                                   (transformers to 5.5.3)
           language_model.model.layers.0...   vision_tower...               (MLX, vLLM)
           ...linear_attn._fp32_params.A_log                                (NeMo Automodel)

Names are compared segment by segment, never by substring or by offset.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from formats.stored import Problem
from formats.tensor import TensorInfo

WRAPPERS = ("model", "language_model")
VISION_HEADS = {"visual": "visual", "vision_tower": "visual"}
FP32_HOLDER = "_fp32_params"

TEXT, HUB = "text", "hub"
PREFIXES = {TEXT: "model.", HUB: "model.language_model."}
TOP_LEVEL = ("lm_head", "mtp")
TRUNK = ("layers", "embed_tokens", "norm")


# last segment of a name: what wrote it
LEFTOVERS = {
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "g_idx": "GPTQ",
    "scales": "GPTQ, AWQ or MLX", "biases": "MLX", "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes", "nested_absmax": "bitsandbytes",
    "nested_quant_map": "bitsandbytes", "SCB": "bitsandbytes",
    "weight_format": "bitsandbytes", "weight_packed": "compressed-tensors 4-bit",
    "weight_shape": "compressed-tensors 4-bit", "weight_zero_point": "compressed-tensors",
    "weight_global_scale": "NVFP4", "k_scale": "KV-cache calibration",
    "v_scale": "KV-cache calibration",
    "weight_scale_2": "NVFP4", "input_global_scale": "NVFP4", "input_scale": "static FP8",
    "gate_up_proj_packed": "compressed-tensors 4-bit",
}  # fmt: skip
LEFTOVER_PARTS = {
    "quant_state": "bitsandbytes",
    "lora_A": "a LoRA adapter",
    "lora_B": "a LoRA adapter",
}
TASK_HEADS = ("score", "classifier", "v_head", "reward_head", "qa_outputs")
FROM_ORIGINAL = "convert the unquantised checkpoint it was made from"
KNOWN_METHODS = ("fp8", "compressed-tensors")


def normalise(name: str) -> str:
    """Return the table's name: wrappers stripped, vision and fp32 holders renamed.

    >>> normalise("model.language_model.language_model.layers.0.mlp.gate.weight")
    'layers.0.mlp.gate.weight'
    """
    segments = name.split(".")
    while segments and segments[0] in WRAPPERS:
        segments.pop(0)
    if segments and segments[0] in VISION_HEADS:
        segments[0] = VISION_HEADS[segments[0]]
    return ".".join(s for s in segments if s != FP32_HOLDER)


def place(hub: str, namespace: str) -> str:
    """Return the table's name as it stands in a namespace (`text` or `hub`)."""
    head = hub.split(".", 1)[0]
    if head in TOP_LEVEL:
        return hub
    return ("model." if head == "visual" else PREFIXES[namespace]) + hub


def prefix_of(stored: str) -> str | None:
    """Return what precedes the table's name in a stored one; None if it is not there as it is."""
    hub = normalise(stored)
    return stored.removesuffix(hub) if stored.endswith(hub) else None


def prefixes(every: Iterable[str]) -> dict[str, str]:
    """Return what precedes the trunk, the head, MTP and vision in most of these stored names."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for stored in every:
        prefix = prefix_of(stored)
        if prefix is not None:
            counts[part_of(normalise(stored))][prefix] += 1
    return {part: found.most_common(1)[0][0] for part, found in counts.items()}


def place_beside(found: Mapping[str, str], hub: str) -> str:
    """Return the table's name as it would stand beside tensors that have these prefixes."""
    prefix = found.get(part_of(hub))
    return place(hub, TEXT) if prefix is None else prefix + hub


def part_of(hub: str) -> str:
    """Return the part of the model that shares a prefix: the trunk, or a head of its own."""
    head = hub.split(".", 1)[0]
    return "trunk" if head in TRUNK else head


def leftover(info: TensorInfo) -> Problem | None:
    """Recognise what another quantiser or trainer left behind."""
    segments = info.name.split(".")
    writer = LEFTOVERS.get(segments[-1])
    if writer is None:
        writer = next((LEFTOVER_PARTS[s] for s in segments if s in LEFTOVER_PARTS), None)
    if writer:
        return Problem(info.name, f"was written by {writer}", FROM_ORIGINAL)
    if normalise(info.name).split(".")[0] in TASK_HEADS:
        return Problem(
            info.name,
            "is a task head, not part of a language model",
            "convert the base model; a head has no place in a text artifact",
        )
    if segments[-1] == "weight" and info.dtype in ("U8", "I8", "I32", "U32"):
        return Problem(
            info.name, f"is packed {info.dtype} with shape {list(info.shape)}", FROM_ORIGINAL
        )
    return None


def rename(every: Iterable[str]) -> tuple[dict[str, str], list[Problem]]:
    """Map each table name to its stored name; two stored names for one are a problem."""
    names: dict[str, str] = {}
    problems = []
    for stored in every:
        hub = normalise(stored)
        if hub in names:
            problems.append(
                Problem(stored, f"is {hub} a second time, beside {names[hub]}", "keep one of them")
            )
        names.setdefault(hub, stored)
    return names, problems
