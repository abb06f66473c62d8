"""Namespaces: what precedes a tensor's name in the wild, and what we refuse by name.

    hub    model.language_model.layers.0...   model.visual...   lm_head   mtp...
    text   model.layers.0...                                    lm_head   mtp...
    base   language_model.layers.0...         visual...                   mtp...   (no head)
    text   layers.0...                                                    mtp...   (no head)
    wild   model.language_model.language_model.language_model.layers.0...   (transformers 5.0-5.5)
           model.language_model.visual...                                   (transformers to 5.5.3)
           language_model.model.layers.0...   vision_tower...               (MLX, vLLM)
           ...linear_attn._fp32_params.A_log                                (NeMo Automodel)
           _orig_mod.module.model.layers.0...                               (what held the model)

Names are compared segment by segment, never by substring or by offset.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from formats.family.packings import PACKINGS
from formats.family.rules import RULES, template
from formats.stored import Problem
from formats.tensor import TensorInfo

WRAPPERS = ("model", "language_model")
VISION_HEADS = {"visual": "visual", "vision_tower": "visual"}
FP32_HOLDER = "_fp32_params"
# Segments that say what held a module when it was saved: no tensor of the family has one.
HOLDERS = {
    FP32_HOLDER: "NeMo Automodel",
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel or DeepSpeed",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
    "base_layer": "PEFT: these are the base model's weights",
}
# The same where only the first segments of a name may be: the attribute that was the model.
OUTER = {
    "base_model": "PEFT",
    "pretrained_model": "TRL",
    "policy": "a trainer",
    "policy_model": "a trainer",
    "actor": "a trainer",
    "actor_model": "a trainer",
    "student": "a trainer",
    "hf_model": "a trainer",
    "wrapped_model": "a trainer",
    "transformer": "a trainer",
    "backbone": "a trainer",
    "text_model": "a trainer",
    "llm": "a trainer",
}

TEXT, HUB = "text", "hub"
TEXT_BASE, HUB_BASE = "text-base", "hub-base"
# namespace: what precedes names of the text model, of the vision tower
PREFIXES = {
    TEXT: ("model.", "model."),
    HUB: ("model.language_model.", "model."),
    TEXT_BASE: ("", ""),
    HUB_BASE: ("language_model.", ""),
}
WITHOUT_HEAD = {TEXT: TEXT_BASE, HUB: HUB_BASE}
TOP_LEVEL = ("lm_head", "mtp")
TRUNK = ("layers", "embed_tokens", "norm")
# First segments of names that show by themselves where the family's names begin.
HEADS = ("layers", "embed_tokens", "lm_head", "mtp", "visual")
# What a model can do without: first segment of the table's names, and the recipe's key.
PARTS = {"visual": "vision", "mtp": "mtp"}

FROM_ORIGINAL = "convert the unquantised checkpoint it was made from"
MERGE = "merge it into its base model, and convert the result: peft's merge_and_unload()"
GATHER = "save the whole model: FSDP with StateDictType.FULL_STATE_DICT"
# last segment of a name: what wrote it
LEFTOVERS = {
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "g_idx": "GPTQ",
    "scales": "GPTQ, AWQ or MLX", "biases": "MLX", "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes", "nested_absmax": "bitsandbytes",
    "nested_quant_map": "bitsandbytes", "SCB": "bitsandbytes",
    "weight_format": "bitsandbytes", "weight_packed": "compressed-tensors 4-bit",
    "weight_shape": "compressed-tensors 4-bit", "weight_zero_point": "compressed-tensors",
    "weight_global_scale": "NVFP4", "weight_scale_2": "NVFP4",
    "gate_up_proj_packed": "compressed-tensors 4-bit",
}  # fmt: skip
LEFTOVER_PARTS = {"quant_state": "bitsandbytes"}
# Segments of an adapter's tensors: LoRA, DoRA, IA3, OFT, LoHa, LoKr, VeRA, and whole modules.
ADAPTER_PARTS = frozenset(
    {"lora_A", "lora_B", "lora_a", "lora_b", "lora_embedding_A", "lora_embedding_B"}
    | {"lora_magnitude_vector", "lora_bias", "ia3_l", "oft_r", "oft_R", "oft_s", "boft_R", "boft_s"}
    | {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"}
    | {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}
    | {"vera_A", "vera_B", "vera_lambda_b", "vera_lambda_d", "modules_to_save", "original_module"}
    | {"prompt_embeddings", "trainable_tokens_delta", "trainable_tokens_original"}
)
FLAT = ("flat_param", "_flat_param")
TASK_HEADS = ("score", "classifier", "v_head", "reward_head", "qa_outputs")
FROM_ORIGINAL = "convert the unquantised checkpoint it was made from"
# What `quant_method` may say, and which `quant_algo` beside it; None: the tensors say the rest.
KNOWN_METHODS: dict[str, tuple[object, ...] | None] = {
    "fp8": None,
    "fbgemm_fp8": None,
    "compressed-tensors": None,
    **dict.fromkeys(PACKINGS),
    "modelopt": (
        *(None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
        *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
    ),
}


def normalise(name: str) -> str:
    """Return the table's name: wrappers stripped, vision renamed.

    >>> normalise("model.language_model.language_model.layers.0.mlp.gate.weight")
    'layers.0.mlp.gate.weight'
    """
    segments = [segment for segment in name.split(".") if segment not in HOLDERS]
    while segments and (segments[0] in WRAPPERS or segments[0] in OUTER):
        segments.pop(0)
    if segments and segments[0] in VISION_HEADS:
        segments[0] = VISION_HEADS[segments[0]]
    return ".".join(segments)


def unwrap(name: str) -> list[str]:
    """Return the segments of a name without what held the model, its namespace among them."""
    segments = [segment for segment in name.split(".") if segment not in HOLDERS]
    while segments and segments[0] in OUTER:
        segments.pop(0)
    return segments


def holders(name: str) -> dict[str, str]:
    """Return the segments of a name that say what held the model, and what that was."""
    segments = name.split(".")
    held = {segment: HOLDERS[segment] for segment in segments if segment in HOLDERS}
    for segment in segments:
        if segment in OUTER:
            held[segment] = OUTER[segment]
        elif segment not in HOLDERS and segment not in WRAPPERS:
            break
    return held


def place(hub: str, namespace: str) -> str:
    """Return the table's name as it stands in a namespace, a key of PREFIXES."""
    head = hub.split(".", 1)[0]
    if head in TOP_LEVEL:
        return hub
    return PREFIXES[namespace][head == "visual"] + hub


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
    return {part: tally.most_common(1)[0][0] for part, tally in counts.items()}


def place_beside(by_part: Mapping[str, str], hub: str) -> str:
    """Return the table's name as it would stand beside tensors that have these prefixes."""
    prefix = by_part.get(part_of(hub))
    return place(hub, TEXT) if prefix is None else prefix + hub


def part_of(hub: str) -> str:
    """Return the part of the model that shares a prefix: the trunk, or a head of its own."""
    head = hub.split(".", 1)[0]
    return "trunk" if head in TRUNK else head


def optional_part(hub: str) -> str:
    """Return what a recipe can drop a tensor of the table with, empty if every model has it."""
    return PARTS.get(hub.split(".", 1)[0], "")


def leftover(info: TensorInfo) -> Problem | None:
    """Recognise what another quantiser or trainer left behind."""
    segments = info.name.split(".")
    writer = LEFTOVERS.get(segments[-1])
    if writer is None:
        writer = next((LEFTOVER_PARTS[s] for s in segments if s in LEFTOVER_PARTS), None)
    if writer:
        return Problem(info.name, f"was written by {writer}", FROM_ORIGINAL)
    if ADAPTER_PARTS.intersection(segments):
        return Problem(info.name, "belongs to an adapter (LoRA) that is not merged", MERGE)
    if segments[-1] in FLAT:
        return Problem(info.name, "is a rank's share of many tensors in one row, by FSDP", GATHER)
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
            twice = f"is {hub} a second time, beside {names[hub]}"
            problems.append(Problem(stored, twice, "keep one of them", cause="twice"))
        names.setdefault(hub, stored)
    return names, problems


def strip_strangers(names: Mapping[str, str]) -> tuple[dict[str, str], list[Problem]]:
    """Return the names without prefixes that nobody knows, and one problem for each of those.

    A prefix is one if what follows it is a name of the family that nothing else has. It is not
    just dropped: who knows what `ema` or `critic` was.
    """
    prefixes = dict.fromkeys(prefix for hub in names if (prefix := _prefix(hub)))
    stripped, problems = dict(names), []
    for prefix in prefixes:
        inner = {hub: _inner(hub, prefix) for hub in names if hub.startswith(prefix)}
        if stripped.keys().isdisjoint(inner.values()) and len(set(inner.values())) == len(inner):
            stripped = {inner.get(hub, hub): stored for hub, stored in stripped.items()}
            problems.append(_stranger(prefix, names[next(iter(inner))], len(inner)))
    return stripped, problems


def _stranger(prefix: str, first: str, count: int) -> Problem:
    return Problem(
        first,
        f"is under {prefix[:-1]!r}, as {count} tensors do, which is no namespace that is known",
        f"if it is the model, save its tensors again without {prefix!r}: "
        f"{{name.split({prefix!r}, 1)[-1]: w for name, w in load_file(FILE).items()}}",
    )


def _inner(hub: str, prefix: str) -> str:
    return normalise(hub.removeprefix(prefix))


def _prefix(hub: str) -> str:
    """Return what precedes a name of the family, with its dot; empty if there is no such name.

    >>> _prefix("thinker.model.layers.0.mlp.up_proj.weight")
    'thinker.'
    """
    head, *rest = hub.split(".")
    prefix = ""
    while rest and head not in HEADS:
        prefix += f"{head}."
        inner = normalise(".".join(rest))
        if inner.split(".", 1)[0] in HEADS and template(inner)[0] in RULES:
            return prefix
        head, *rest = rest
    return ""
