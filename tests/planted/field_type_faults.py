"""Faults in config.json that only a strict reader sees: null, text for a number, one too many."""

from __future__ import annotations

from collections.abc import Iterator

from tests.planted.config_faults import HUB, MOE, Change, config_fault, put, vision
from tests.planted.fault import Fault
from tests.planted.quantization_faults import OFFICIAL, block_fault


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (field, change) in TEXT.items():
        yield config_fault(name, field, change)
    for name, (field, change) in NESTED.items():
        yield config_fault(name, field, change, HUB)
    yield config_fault("router-weights-null", "norm_topk_prob", put("norm_topk_prob", None), MOE)
    yield block_fault(
        "activations-missing", "activation_scheme", lambda b: b.pop("activation_scheme"), OFFICIAL
    )


# name: (field that must be named, change)
TEXT: dict[str, tuple[str, Change]] = {
    "rope-theta-by-one": ("rope_theta", put("rope_parameters.rope_theta", 10000001)),
    "rope-type-null": ("rope_type", put("rope_parameters.rope_type", None)),
    "output-gate-null": ("attn_output_gate", put("attn_output_gate", None)),
    "initializer-range-as-text": ("initializer_range", put("initializer_range", "0.02")),
    "initializer-range-null": ("initializer_range", put("initializer_range", None)),
    "use-cache-null": ("use_cache", put("use_cache", None)),
    "use-cache-as-text": ("use_cache", put("use_cache", "false")),
    "tie-flag-null": ("tie_word_embeddings", put("tie_word_embeddings", None)),
    "labels-as-a-list": ("id2label", put("id2label", ["a"])),
}
NESTED: dict[str, tuple[str, Change]] = {
    "text-type-empty": ("model_type", put("model_type", "")),
    "text-type-null": ("model_type", put("model_type", None)),
    "vision-initializer-range-null": ("initializer_range", vision("initializer_range", None)),
}
