"""Why a tensor has no place: a field of the config denies it one, or nobody knows it."""

from __future__ import annotations

from collections.abc import Collection

from formats.family.config import Config
from formats.family.rules import RULES, template
from formats.family.unused import COPIES

MIXERS = {"linear_attn": "linear_attention", "self_attn": "full_attention"}
# A mixer, and a tensor by which the other one is known.
OTHER_MIXER = {"linear_attn": "self_attn.q_proj.weight", "self_attn": "linear_attn.A_log"}


def why_unplaced(hub: str, config: Config) -> str:
    """Say why a tensor has no place, by the field that denies it one."""
    key, numbers = template(hub)
    if key in COPIES:
        return f"is not a copy of {COPIES[key][0]}, which the family's MTP head shares"
    if key not in RULES:
        return "is not a tensor of the Qwen3.5 family"
    reason = (
        _of_vision(key, numbers, config)
        or _wrong_layer(key, numbers, config)
        or _wrong_expert(key, numbers, config)
    )
    kind = "mixture of experts" if config.moe else "dense model"
    return reason or f"has no place beside the other tensors in a {kind} of this {config.origin}"


def _of_vision(key: str, numbers: tuple[int, ...], config: Config) -> str | None:
    if not key.startswith("visual."):
        return None
    if config.vision is None:
        return f"is visual, but {config.origin} has no vision_config"
    return f"is in block {numbers[0]}, but {config.fields['vD']} is {config.sizes['vD']}"


def _wrong_expert(key: str, numbers: tuple[int, ...], config: Config) -> str | None:
    if ".experts.#." not in key or not config.moe or numbers[1] < config.sizes["E"]:
        return None
    return f"is expert {numbers[1]}, but {config.fields['E']} is {config.sizes['E']}"


def _wrong_layer(key: str, numbers: tuple[int, ...], config: Config) -> str | None:
    if not key.startswith("layers.#."):
        return None
    layer, types = numbers[0], config.layer_types
    if layer >= len(types):
        return f"is in layer {layer}, but {config.fields['L']} is {len(types)}"
    mixer = _mixer(key)
    if mixer in (None, types[layer]):
        return None
    return f"has no place in a layer that {config.fields['kinds']} calls {types[layer]}"


def _mixer(hub: str) -> str | None:
    return next((MIXERS[segment] for segment in hub.split(".") if segment in MIXERS), None)


def has_other_mixer(hub: str, held: Collection[str]) -> bool:
    """Tell whether a mixer's tensor is missing because its layer holds the other mixer."""
    head, _, rest = hub.partition(".")
    layer, _, name = rest.partition(".")
    other = OTHER_MIXER.get(name.split(".", 1)[0])
    return head == "layers" and other is not None and f"layers.{layer}.{other}" in held
