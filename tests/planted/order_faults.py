"""Faults of order: right values under another name, in other rows, in another layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tests.planted.artifact import Base
from tests.planted.edit import Tensors, reading
from tests.planted.fault import Fault, Names, in_bases
from tests.planted.tensor_fault import Plant, change, row_zeroed, rows_swapped, swap, tensor_fault

DENSE = (
    "nano-fp8-block",
    "nano-fp8-block-hub",
    "wide-fp8-channel",
    "nano-bf16-split",
    "wide-mixed",
    "wide-bf16",
    "nano-q8_0",
    "wide-q6_k",
    "wide-q5_k_m",
    "wide-q4_k_m",
    "wide-iq4_xs",
)
HOMES = in_bases(*DENSE, "moe-mxfp4_moe")
UNTIED = in_bases(
    "wide-fp8-block",
    "wide-fp8-channel",
    "wide-bf16-split",
    "wide-mixed",
    "wide-bf16",
    "wide-q6_k",
    "wide-q4_k_m",
    "wide-iq4_xs",
    "wide-iq3_s",
    "moe-mxfp4_moe",
    "moe-q8_0",
)


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, plant in SWAPS.items():
        yield tensor_fault("order", name, plant, HOMES)
    for name, plant in SQUARE.items():
        yield tensor_fault("order", name, plant, UNTIED)
    for name, plant in HEAD.items():
        yield tensor_fault("head", name, plant, UNTIED)
    for name, part in (("layers", ""), ("mixers", "linear_attn."), ("mlps", "mlp.")):
        plant = partial(_swap_layers, part=part)
        yield tensor_fault("layers", f"two-{name}", plant, in_bases(*DENSE))
    yield tensor_fault("layers", "mtp-a-copy-of-the-trunk", _copy_to_mtp, HOMES)
    for name, prefix in (
        ("mtp", "mtp."),
        ("a-layer", "layers.1."),
        ("the-last-norm", "norm."),
        ("the-embedding", "embed_tokens."),
    ):
        plant = partial(_transplant, prefix=prefix)
        yield tensor_fault("layers", f"{name}-of-another-model", plant, UNTIED)


def halves(values: Tensor) -> Tensor:
    """Exchange the two halves of the rows."""
    return values.roll(len(values) // 2, 0)


def heads_reversed(values: Tensor) -> Tensor:
    """Reverse the order of two heads' rows."""
    return torch.cat(values.chunk(2)[::-1])


def last_heads_swapped(values: Tensor) -> Tensor:
    """Swap the last two of as many value heads as there may be: their rows are the last."""
    rows = len(values) // 10
    return torch.cat((values[: -2 * rows], values[-rows:], values[-2 * rows : -rows]))


def gate_apart(values: Tensor) -> Tensor:
    """Store query and gate of all heads as two halves, not head by head."""
    width = 64 if len(values) == 512 else 256
    heads = values.reshape(-1, 2, width, values.shape[-1])
    return heads.transpose(0, 1).reshape(values.shape)


def interleaved(values: Tensor) -> Tensor:
    """Pair rows as converters of Llama's do, where this family keeps halves."""
    halves = values.reshape(2, 2, -1, values.shape[-1])
    return halves.transpose(1, 2).reshape(values.shape)


def turned(values: Tensor) -> Tensor:
    """Transpose."""
    return values.T.contiguous()


def _tie(tensors: Tensors) -> str:
    """Store the embedding in the place of the head."""
    return tensors.store("lm_head.weight", tensors.values("embed_tokens.weight"))


SWAPS: dict[str, Plant] = {
    "gate-and-up": swap("{mlp}gate_proj.weight", "{mlp}up_proj.weight"),
    "key-and-value": swap("{full}.self_attn.k_proj.weight", "{full}.self_attn.v_proj.weight"),
    "alpha-and-beta": swap("{delta}in_proj_a.weight", "{delta}in_proj_b.weight"),
    "norms-of-a-layer": swap(
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"
    ),
    "query-and-key-norm": swap("{full}.self_attn.q_norm.weight", "{full}.self_attn.k_norm.weight"),
    "norms-of-mtp": swap("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
    "mtp-and-trunk": swap("{full}.self_attn.o_proj.weight", "mtp.layers.0.self_attn.o_proj.weight"),
    "query-and-gate-apart": change("{full}.self_attn.q_proj.weight", gate_apart),
    "rows-of-the-delta-input-rotated": change("{delta}in_proj_qkv.weight", halves),
    "value-heads-of-z": change("{delta}in_proj_z.weight", heads_reversed),
    "value-heads-of-qkv": change("{delta}in_proj_qkv.weight", last_heads_swapped),
    "value-heads-of-out": change("{delta}out_proj.weight", lambda v: heads_reversed(v.T).T),
    "two-rows": change("{mlp}down_proj.weight", rows_swapped),
    "rotary-halves-interleaved": change("{full}.self_attn.k_proj.weight", interleaved),
    "key-and-value-of-mtp": swap(
        "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.v_proj.weight"
    ),
    "two-tokens": change("embed_tokens.weight", rows_swapped),
    "mtp-halves": change("mtp.fc.weight", lambda v: halves(v.T).T),
}
SQUARE: dict[str, Plant] = {
    "transposed-square": change("{full}.self_attn.o_proj.weight", turned),
    "transposed-square-of-mtp": change("mtp.layers.0.self_attn.o_proj.weight", turned),
}
HEAD: dict[str, Plant] = {
    "swapped-with-the-embedding": swap("lm_head.weight", "embed_tokens.weight"),
    "two-rows": change("lm_head.weight", rows_swapped),
    "shifted-by-a-token": change("lm_head.weight", lambda v: v.roll(1, 0)),
    "zeroed-row": change("lm_head.weight", row_zeroed),
    "a-copy-of-the-embedding": _tie,
}


def _copy_to_mtp(tensors: Tensors) -> str:
    values = tensors.values("{full}.self_attn.q_proj.weight")
    return tensors.store("mtp.layers.0.self_attn.q_proj.weight", values)


def hub_names(tensors: Tensors, prefix: str) -> list[str]:
    """Return the hub names of stored weights below a prefix, scales not among them."""
    workshop, model = tensors.artifact.workshop, tensors.artifact.base.model
    whole = reading(workshop.open(Base(model, "bf16-split")))
    names = [name.removeprefix("model.") for name in whole.names()]
    return [name for name in names if name.startswith(prefix)]


def _swap_layers(tensors: Tensors, part: str) -> Names:
    for name in hub_names(tensors, f"layers.0.{part}"):
        tensors.swap(name, name.replace("layers.0.", "layers.1."))
    return "layers.0 is swapped with layers.1"


def _transplant(tensors: Tensors, prefix: str) -> Names:
    artifact, found = tensors.artifact, []
    other = reading(artifact.workshop.open(artifact.base, seed=36))
    for name in hub_names(tensors, prefix):
        stored, scale = tensors.stored(name), tensors.scale(name)
        for part in (stored, *([scale.info.name] if scale else ())):
            tensors.entry(part).data[:] = other.entry(part).data
        found.append(stored)
    return tuple(dict.fromkeys(found))
