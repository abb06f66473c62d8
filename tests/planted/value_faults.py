"""Faults of values: rows lost, signs turned, norms shifted, experts mixed up; rightly encoded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.planted.edit import Tensors
from tests.planted.fault import Fault, Names, in_bases
from tests.planted.header_faults import FILES
from tests.planted.order_faults import HOMES, turned
from tests.planted.tensor_fault import (
    Change,
    Plant,
    change,
    row_zeroed,
    rows_swapped,
    swap,
    tensor_fault,
)

# Norms whose 1 + w has more than the eleven bits of F16.
LONG_NORMS = in_bases("wide-bf16", "wide-q4_k_m", "moe-mxfp4_moe")
SEARCHED = in_bases("wide-q6_k", "wide-q5_k_m", "wide-q4_k_m", "wide-iq4_xs", "wide-iq3_s")
MOE = in_bases(
    "moe-fp8-block",
    "moe-fp8-block-hub",
    "moe-fp8-channel",
    "moe-bf16-split",
    "moe-q8_0",
    "moe-q4_k_m",
    "moe-mxfp4_moe",
)


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, plant in VALUES.items():
        yield tensor_fault("values", name, plant, HOMES)
    for name, how in SLIGHTLY.items():
        yield tensor_fault("values", name, change("{mlp}up_proj.weight", how), SEARCHED)
    for name, plant in CONTROL.items():
        yield tensor_fault("control", name, plant, HOMES)
    yield tensor_fault("control", "norm-added-in-f16", NORM_IN_F16, LONG_NORMS)
    for name, plant in ROUNDED.items():
        yield tensor_fault("control", name, plant, FILES)
    for name, plant in EXPERTS.items():
        yield tensor_fault("experts", name, plant, MOE)


def column_zeroed(values: Tensor) -> Tensor:
    """Lose a column."""
    values[:, 5] = 0
    return values


def block_zeroed(values: Tensor) -> Tensor:
    """Lose a block of 128 x 128."""
    values[:128, :128] = 0
    return values


def block_copied(values: Tensor) -> Tensor:
    """Let a block of rows be its neighbour's copy."""
    values[32:64] = values[:32]
    return values


def clipped(values: Tensor) -> Tensor:
    """Clip what is large, as a search for a better scale does that goes wrong."""
    limit = 0.5 * values.abs().max()
    return values.clamp(-limit, limit)


def one_element(values: Tensor) -> Tensor:
    """Change one element to the largest, with the other sign."""
    values[4, 9] = -values.abs().max() * values[4, 9].sign()
    return values


def ulp(values: Tensor) -> Tensor:
    """Change the last bit of the largest element's BF16 value."""
    at = int(values.abs().argmax())
    values.view(-1)[at] *= 1 + 2**-7
    return values


def last_element(values: Tensor) -> Tensor:
    """Change the last element, where loops over chunks end."""
    values.view(-1)[-1] = 1 + 2 * values.abs().max()
    return values


def small_flushed(values: Tensor) -> Tensor:
    """Let what is small become zero."""
    return torch.where(values.abs() < values.abs().mean() / 3, 0, values)


def pruned(values: Tensor) -> Tensor:
    """Keep two of four, as sparse kernels have it."""
    fours = values.reshape(len(values), -1, 4).abs()
    kept = fours >= fours.topk(2, -1).values[..., 1:]
    return torch.where(kept.reshape(values.shape), values, 0)


def rotated(values: Tensor) -> Tensor:
    """Turn pairs of columns by 45 degrees, as a rotation does that nobody undoes."""
    turn = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    return (values.reshape(len(values), -1, 2) @ turn).reshape(values.shape)


def noisy(values: Tensor) -> Tensor:
    """Add noise of a twentieth of the values' deviation."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(5))
    return values + 0.05 * values.std() * noise


# What the bounds of a scheme let pass where its codes are searched for.
SLIGHTLY: dict[str, Change] = {
    "a-per-cent-more": lambda values: values * 1.01,
    "three-per-cent-less": lambda values: values * 0.97,
    "noise-of-five-per-cent": noisy,
    "shifted-by-a-twentieth": lambda values: values + 0.05 * values.std(),
}
VALUES: dict[str, Plant] = {
    "a-row-zeroed": change("{mlp}up_proj.weight", row_zeroed),
    "a-column-zeroed": change("{mlp}down_proj.weight", column_zeroed),
    "a-block-zeroed": change("{full}.self_attn.o_proj.weight", block_zeroed),
    "a-block-copied": change("{delta}in_proj_qkv.weight", block_copied),
    "all-zero": change("mtp.layers.0.self_attn.v_proj.weight", torch.zeros_like),
    "sign-turned": change("{delta}in_proj_z.weight", torch.neg),
    "doubled": change("{full}.self_attn.v_proj.weight", lambda v: 2 * v),
    "clipped": change("{mlp}up_proj.weight", clipped),
    "one-element": change("{mlp}down_proj.weight", one_element),
    "last-element": change("{mlp}down_proj.weight", last_element),
    "last-element-of-the-embedding": change("embed_tokens.weight", last_element),
    "small-ones-flushed": change("{mlp}up_proj.weight", small_flushed),
    "two-of-four-kept": change("{mlp}down_proj.weight", pruned),
    "columns-rotated": change("{mlp}up_proj.weight", rotated),
    "transposed-blocks": change(
        "{full}.self_attn.k_proj.weight",
        lambda v: v.reshape(2, -1, v.shape[-1]).transpose(0, 1).reshape(v.shape),
    ),
    "mean-taken-off": change("{mlp}gate_proj.weight", lambda v: v - v.mean() - v.std()),
    "an-embedding-zeroed": change("embed_tokens.weight", row_zeroed),
}
CONTROL: dict[str, Plant] = {
    "norm-plus-one": change("layers.0.input_layernorm.weight", lambda v: v + 1),
    "norm-minus-one": change("layers.1.post_attention_layernorm.weight", lambda v: v - 1),
    "query-norm-plus-one": change("{full}.self_attn.q_norm.weight", lambda v: v + 1),
    "delta-norm-minus-one": change("{delta}norm.weight", lambda v: v - 1),
    "last-norm-plus-one": change("norm.weight", lambda v: v + 1),
    "mtp-norm-minus-one": change("mtp.norm.weight", lambda v: v - 1),
    "norm-of-ones": change("layers.1.input_layernorm.weight", torch.ones_like),
    "decay-sign": change("{delta}A_log", torch.neg),
    "decay-exp": change("{delta}A_log", torch.exp),
    "decay-log": change("{delta}A_log", lambda v: v.abs().log()),
    "decay-heads": change("{delta}A_log", lambda v: v.flip(0)),
    "dt-bias-zeroed": change("{delta}dt_bias", torch.zeros_like),
    "dt-bias-heads": change("{delta}dt_bias", lambda v: v.flip(0)),
    "dt-bias-softplus": change("{delta}dt_bias", torch.nn.functional.softplus),
    "conv-reversed": change("{delta}conv1d.weight", lambda v: v.flip(-1)),
    "conv-shifted": change("{delta}conv1d.weight", lambda v: v.roll(1, -1)),
    "conv-channels": change("{delta}conv1d.weight", rows_swapped),
    "alpha-heads": change("{delta}in_proj_a.weight", lambda v: v.flip(0)),
    "norm-by-an-ulp": change("layers.0.input_layernorm.weight", ulp),
    "delta-norm-by-an-ulp": change("{delta}norm.weight", ulp),
    "dt-bias-by-an-ulp": change("{delta}dt_bias", ulp),
    "conv-by-an-ulp": change("{delta}conv1d.weight", ulp),
    "decay-by-a-bf16-ulp": change("{delta}A_log", ulp),
    "nan": change("{delta}dt_bias", lambda v: v / 0 * 0),
    "infinity": change("norm.weight", lambda v: v / 0),
}


def _copy_expert(tensors: Tensors) -> str:
    values = tensors.values("{experts}1.down_proj.weight")
    return tensors.store("{experts}2.down_proj.weight", values)


def _swap_experts(tensors: Tensors) -> Names:
    for projection in ("gate_proj", "up_proj", "down_proj"):
        one, two = ("{experts}" + f"{e}.{projection}.weight" for e in (0, 3))
        tensors.swap(one, two)
    return "layers.1.mlp.experts.0 is swapped with layers.1.mlp.experts.3"


NORM_IN_F16 = change("norm.weight", lambda v: v.half().float())
# What a file holds in F32, 1 + w and -exp(A_log), computed in another type or carelessly.
ROUNDED: dict[str, Plant] = {
    "norm-added-in-bf16": change("layers.0.input_layernorm.weight", lambda v: v.bfloat16().float()),
    "decay-by-64-ulp": change("{delta}A_log", lambda v: v * (1 + 2.0**-17)),
}


def _roll_experts(tensors: Tensors) -> Names:
    names = ["{experts}" + f"{e}.up_proj.weight" for e in range(4)]
    values = [tensors.values(name) for name in names]
    rolled = zip(names, values[1:] + values[:1], strict=True)
    return tuple(dict.fromkeys([tensors.store(*pair) for pair in rolled]))


EXPERTS: dict[str, Plant] = {
    "one-projection-of-two-swapped": swap("{experts}0.up_proj.weight", "{experts}3.up_proj.weight"),
    "two-swapped": _swap_experts,
    "gate-and-up-of-one": swap("{experts}2.gate_proj.weight", "{experts}2.up_proj.weight"),
    "shared-and-one-swapped": swap(
        "{experts}1.gate_proj.weight", "layers.1.mlp.shared_expert.gate_proj.weight"
    ),
    "rolled": _roll_experts,
    "one-copied": _copy_expert,
    "one-zeroed": change("{experts}3.down_proj.weight", torch.zeros_like),
    "one-transposed": change("{experts}0.gate_proj.weight", turned),
    "layers-of-one-swapped": swap(
        "{experts}1.up_proj.weight", "layers.0.mlp.experts.1.up_proj.weight"
    ),
    "mtp-and-trunk": swap("{experts}1.up_proj.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
    "router-rows": change("layers.0.mlp.gate.weight", lambda v: v.roll(1, 0)),
    "router-by-an-ulp": change("layers.1.mlp.gate.weight", ulp),
    "router-zeroed": change("mtp.layers.0.mlp.gate.weight", torch.zeros_like),
    "shared-gate-zeroed": change("layers.0.mlp.shared_expert_gate.weight", torch.zeros_like),
    "shared-gate-sign": change("layers.1.mlp.shared_expert_gate.weight", torch.neg),
}
