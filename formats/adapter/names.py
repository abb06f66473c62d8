"""Names of an adapter's tensors: which module of the model, and which factor of its change.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight        [r, K]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight        [N, r], .bias [N]
    base_model.model.model.embed_tokens.lora_embedding_A / _B             [r, V] / [H, r]
    base_model.model.model.layers.3.mlp.experts[.base_layer].lora_A.weight   fused experts
    base_model.model.lm_head.weight                                       a module saved whole

After `base_model.model.` stands the name in the model that was trained, text-only or not. Where
several parameters of one module were trained, each wraps the one before it: `base_layer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.family.leftovers import ADAPTER_PARTS
from formats.family.names import normalise
from formats.stored import Problem

PEFT_MERGE = "merge it with peft's merge_and_unload(), and convert what save_pretrained() writes"
SAVE = "save the adapter with peft's save_pretrained()"
PREFIX = "base_model.model."
WRAPPED = "base_layer"
# How a name ends: what that tensor is.
LEFT, RIGHT, BIAS, LEFT_ROWS, RIGHT_ROWS = "B", "A", "bias", "embedding_A", "embedding_B"
ENDINGS = {
    ("lora_A", "weight"): RIGHT,
    ("lora_B", "weight"): LEFT,
    ("lora_B", "bias"): BIAS,
    ("lora_embedding_A",): LEFT_ROWS,
    ("lora_embedding_B",): RIGHT_ROWS,
}
OTHERS = {"lora_magnitude_vector": "DoRA", "trainable_tokens_delta": "trainable tokens"}
WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an adapter.

    stored  its name in the file
    kind    which factor it is, or WHOLE
    module  the module's name in the model that was trained; of a whole tensor, the tensor's
    depth   how many parameters of the same module were wrapped after this one
    """

    stored: str
    kind: str
    module: str
    depth: int = 0

    @property
    def hub(self) -> str:
        """The table's name of the module, or of the whole tensor."""
        return normalise(self.module)


def parse_part(stored: str) -> Part | Problem:
    """Return what a tensor of an adapter is, by its name, or why it is none."""
    if not stored.startswith(PREFIX):
        return Problem(stored, f"is not a tensor of PEFT: it does not begin with {PREFIX}", SAVE)
    segments = stored.removeprefix(PREFIX).split(".")
    for ending, kind in ENDINGS.items():
        if tuple(segments[-len(ending) :]) == ending:
            module = segments[: -len(ending)]
            inner = [segment for segment in module if segment != WRAPPED]
            return Part(stored, kind, ".".join(inner), len(module) - len(inner))
    other = next((OTHERS[segment] for segment in segments if segment in OTHERS), None)
    if other or ADAPTER_PARTS.intersection(segments):
        kind = other or "another kind of adapter"
        return Problem(stored, f"belongs to {kind}, expected plain LoRA", PEFT_MERGE)
    return Part(stored, WHOLE, ".".join(s for s in segments if s != WRAPPED))
