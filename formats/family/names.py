"""Namespaces: what precedes a tensor's name in the wild.

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
from functools import lru_cache

from formats.family.rules import RULES, template
from formats.stored import Problem

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


@lru_cache(maxsize=1 << 16)  # each name of a checkpoint is asked for several times
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
