"""Faults in the values of tensors, encoded as they should be: in folders and GGUF files alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quant.fp8.reference import dequantize_channel, quantize_channel
from tests.planted.artifact import Artifact, Base, find_base
from tests.planted.edit import Tensors, editing, reading
from tests.planted.fault import BOTH, FORGED, Fault, Names, Where

Change = Callable[[Tensor], Tensor]
Plant = Callable[[Tensors], Names]
# Types whose encoders search: another search finds other codes, and only the receipt tells whose.
SEARCHED = ("q6_k", "q5_k_m", "q4_k_m", "iq4_xs")
HOMES = (
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "nano-bf16-split", "wide-mixed",
    "wide-bf16", "nano-q8_0", "wide-q6_k", "wide-q5_k_m", "wide-q4_k_m", "wide-iq4_xs",
    "moe-mxfp4_moe",
)  # fmt: skip
MOE = ("moe-fp8-block", "moe-fp8-block-hub", "moe-fp8-channel", "moe-bf16-split", "moe-q8_0",
       "moe-q4_k_m", "moe-mxfp4_moe")  # fmt: skip
UNTIED = ("wide-fp8-block", "wide-fp8-channel", "wide-bf16-split", "wide-mixed", "wide-bf16",
          "wide-q6_k", "wide-q4_k_m", "wide-iq4_xs", "moe-mxfp4_moe", "moe-q8_0")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Names_:
    """Hub names in a model whose layers are of two kinds."""

    model: str
    delta: str = "layers.0.linear_attn."

    @property
    def full(self) -> str:
        """Return the prefix of the full-attention layer."""
        return {"nano": "layers.3", "wide": "layers.2", "moe": "layers.1"}[self.model]

    def mlp(self, projection: str, layer: str = "layers.0") -> str:
        """Return an MLP weight, of the second expert where there are experts."""
        experts = "experts.1." if self.model == "moe" else ""
        return f"{layer}.mlp.{experts}{projection}.weight"


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    homes, moe, untied = _among(HOMES), _among(MOE), _among(UNTIED)
    for name, plant in SWAPS.items():
        yield _fault("order", name, plant, homes)
    for name, plant in VALUES.items():
        yield _fault("values", name, plant, homes)
    for name, plant in CONTROL.items():
        yield _fault("control", name, plant, homes)
    for name, plant in EXPERTS.items():
        yield _fault("experts", name, plant, moe)
    for name, plant in HEAD.items():
        yield _fault("head", name, plant, untied)
    for name, plant in SQUARE.items():
        yield _fault("order", name, plant, _among(UNTIED))
    yield from _other_values()
    yield from _layers()


def _among(names: tuple[str, ...]) -> Where:
    return lambda base: base.id in names


def _fault(
    kind: str, name: str, plant: Plant, where: Where, receipts: tuple[str, ...] = BOTH
) -> Fault:
    return Fault(kind, name, partial(_apply, plant=plant), where, receipts=receipts)


def _apply(artifact: Artifact, plant: Plant) -> Names:
    with editing(artifact) as tensors:
        return plant(tensors)


def _names(tensors: Tensors) -> Names_:
    return Names_(tensors.artifact.base.model)


def change(pick: Callable[[Names_], str], how: Change) -> Plant:
    """Return a fault that changes one tensor's values."""

    def plant(tensors: Tensors) -> str:
        name = pick(_names(tensors))
        return tensors.store(name, how(tensors.values(name)))

    return plant


def swap(one: Callable[[Names_], str], two: Callable[[Names_], str]) -> Plant:
    """Return a fault that swaps two tensors' values."""
    return lambda tensors: tensors.swap(one(_names(tensors)), two(_names(tensors)))


def delta(name: str) -> Callable[[Names_], str]:
    """Return what picks a tensor of the delta rule."""
    return lambda names: names.delta + name


def attention(name: str) -> Callable[[Names_], str]:
    """Return what picks a tensor of the full-attention layer."""
    return lambda names: f"{names.full}.self_attn.{name}"


def mlp(projection: str) -> Callable[[Names_], str]:
    """Return what picks an MLP weight."""
    return lambda names: names.mlp(projection)


def plain(name: str) -> Callable[[Names_], str]:
    """Return what picks a tensor that every model has."""
    return lambda _: name


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


def row_zeroed(values: Tensor) -> Tensor:
    """Lose a row."""
    values[3] = 0
    return values


def column_zeroed(values: Tensor) -> Tensor:
    """Lose a column."""
    values[:, 5] = 0
    return values


def block_zeroed(values: Tensor) -> Tensor:
    """Lose a block of 128 x 128."""
    values[:128, :128] = 0
    return values


def rows_swapped(values: Tensor) -> Tensor:
    """Swap two rows."""
    values[[7, 8]] = values[[8, 7]]
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


SWAPS: dict[str, Plant] = {
    "gate-and-up": swap(mlp("gate_proj"), mlp("up_proj")),
    "key-and-value": swap(attention("k_proj.weight"), attention("v_proj.weight")),
    "alpha-and-beta": swap(delta("in_proj_a.weight"), delta("in_proj_b.weight")),
    "norms-of-a-layer": swap(
        plain("layers.0.input_layernorm.weight"),
        plain("layers.0.post_attention_layernorm.weight")),
    "query-and-key-norm": swap(attention("q_norm.weight"), attention("k_norm.weight")),
    "norms-of-mtp": swap(
        plain("mtp.pre_fc_norm_embedding.weight"), plain("mtp.pre_fc_norm_hidden.weight")),
    "mtp-and-trunk": swap(
        attention("o_proj.weight"), plain("mtp.layers.0.self_attn.o_proj.weight")),
    "query-and-gate-apart": change(attention("q_proj.weight"), gate_apart),
    "rows-of-the-delta-input-rotated": change(delta("in_proj_qkv.weight"), halves),
    "value-heads-of-z": change(delta("in_proj_z.weight"), heads_reversed),
    "value-heads-of-qkv": change(delta("in_proj_qkv.weight"), last_heads_swapped),
    "value-heads-of-out": change(delta("out_proj.weight"), lambda v: heads_reversed(v.T).T),
    "two-rows": change(mlp("down_proj"), rows_swapped),
    "two-tokens": change(plain("embed_tokens.weight"), rows_swapped),
    "mtp-halves": change(plain("mtp.fc.weight"), lambda v: halves(v.T).T),
}  # fmt: skip
VALUES: dict[str, Plant] = {
    "a-row-zeroed": change(mlp("up_proj"), row_zeroed),
    "a-column-zeroed": change(mlp("down_proj"), column_zeroed),
    "a-block-zeroed": change(attention("o_proj.weight"), block_zeroed),
    "a-block-copied": change(delta("in_proj_qkv.weight"), block_copied),
    "all-zero": change(plain("mtp.layers.0.self_attn.v_proj.weight"), torch.zeros_like),
    "sign-turned": change(delta("in_proj_z.weight"), torch.neg),
    "doubled": change(attention("v_proj.weight"), lambda v: 2 * v),
    "three-per-cent-more": change(mlp("gate_proj"), lambda v: 1.03 * v),
    "clipped": change(mlp("up_proj"), clipped),
    "one-element": change(mlp("down_proj"), one_element),
    "transposed-blocks": change(attention("k_proj.weight"),
        lambda v: v.reshape(2, -1, v.shape[-1]).transpose(0, 1).reshape(v.shape)),
    "mean-taken-off": change(mlp("gate_proj"), lambda v: v - v.mean() - v.std()),
    "an-embedding-zeroed": change(plain("embed_tokens.weight"), row_zeroed),
}  # fmt: skip
CONTROL: dict[str, Plant] = {
    "norm-plus-one": change(plain("layers.0.input_layernorm.weight"), lambda v: v + 1),
    "norm-minus-one": change(plain("layers.1.post_attention_layernorm.weight"), lambda v: v - 1),
    "query-norm-plus-one": change(attention("q_norm.weight"), lambda v: v + 1),
    "delta-norm-minus-one": change(delta("norm.weight"), lambda v: v - 1),
    "last-norm-plus-one": change(plain("norm.weight"), lambda v: v + 1),
    "mtp-norm-minus-one": change(plain("mtp.norm.weight"), lambda v: v - 1),
    "norm-of-ones": change(plain("layers.1.input_layernorm.weight"), torch.ones_like),
    "decay-sign": change(delta("A_log"), torch.neg),
    "decay-exp": change(delta("A_log"), torch.exp),
    "decay-log": change(delta("A_log"), lambda v: v.abs().log()),
    "decay-heads": change(delta("A_log"), lambda v: v.flip(0)),
    "dt-bias-zeroed": change(delta("dt_bias"), torch.zeros_like),
    "dt-bias-heads": change(delta("dt_bias"), lambda v: v.flip(0)),
    "dt-bias-softplus": change(delta("dt_bias"), torch.nn.functional.softplus),
    "conv-reversed": change(delta("conv1d.weight"), lambda v: v.flip(-1)),
    "conv-shifted": change(delta("conv1d.weight"), lambda v: v.roll(1, -1)),
    "conv-channels": change(delta("conv1d.weight"), rows_swapped),
    "alpha-heads": change(delta("in_proj_a.weight"), lambda v: v.flip(0)),
    "norm-by-an-ulp": change(plain("layers.0.input_layernorm.weight"), ulp),
    "delta-norm-by-an-ulp": change(delta("norm.weight"), ulp),
    "dt-bias-by-an-ulp": change(delta("dt_bias"), ulp),
    "conv-by-an-ulp": change(delta("conv1d.weight"), ulp),
    "decay-by-a-bf16-ulp": change(delta("A_log"), ulp),
    "nan": change(delta("dt_bias"), lambda v: v / 0 * 0),
    "infinity": change(plain("norm.weight"), lambda v: v / 0),
}


def expert(index: int, projection: str) -> Callable[[Names_], str]:
    """Return what picks a weight of one expert."""
    return plain(f"layers.1.mlp.experts.{index}.{projection}.weight")


def _copy_expert(tensors: Tensors) -> str:
    values = tensors.values(expert(1, "down_proj")(_names(tensors)))
    return tensors.store(expert(2, "down_proj")(_names(tensors)), values)


def _swap_experts(tensors: Tensors) -> Names:
    found: list[str] = []
    for projection in ("gate_proj", "up_proj", "down_proj"):
        found += tensors.swap(
            expert(0, projection)(_names(tensors)), expert(3, projection)(_names(tensors))
        )
    return tuple(dict.fromkeys(found))


EXPERTS: dict[str, Plant] = {
    "one-projection-of-two-swapped": swap(expert(0, "up_proj"), expert(3, "up_proj")),
    "two-swapped": _swap_experts,
    "gate-and-up-of-one": swap(expert(2, "gate_proj"), expert(2, "up_proj")),
    "shared-and-one-swapped": swap(
        expert(1, "gate_proj"), plain("layers.1.mlp.shared_expert.gate_proj.weight")),
    "one-copied": _copy_expert,
    "one-zeroed": change(expert(3, "down_proj"), torch.zeros_like),
    "one-transposed": change(expert(0, "gate_proj"), lambda v: v.T.contiguous()),
    "layers-of-one-swapped": swap(expert(1, "up_proj"),
        plain("layers.0.mlp.experts.1.up_proj.weight")),
    "mtp-and-trunk": swap(expert(1, "up_proj"), plain("mtp.layers.0.mlp.experts.1.up_proj.weight")),
    "router-rows": change(plain("layers.0.mlp.gate.weight"), lambda v: v.roll(1, 0)),
    "router-by-an-ulp": change(plain("layers.1.mlp.gate.weight"), ulp),
    "router-zeroed": change(plain("mtp.layers.0.mlp.gate.weight"), torch.zeros_like),
    "shared-gate-zeroed": change(plain("layers.0.mlp.shared_expert_gate.weight"), torch.zeros_like),
    "shared-gate-sign": change(plain("layers.1.mlp.shared_expert_gate.weight"), torch.neg),
}  # fmt: skip
HEAD: dict[str, Plant] = {
    "swapped-with-the-embedding": swap(plain("lm_head.weight"), plain("embed_tokens.weight")),
    "two-rows": change(plain("lm_head.weight"), rows_swapped),
    "shifted-by-a-token": change(plain("lm_head.weight"), lambda v: v.roll(1, 0)),
    "zeroed-row": change(plain("lm_head.weight"), row_zeroed),
}


def _tie(tensors: Tensors) -> str:
    return tensors.store("lm_head.weight", tensors.values("embed_tokens.weight"))


HEAD["a-copy-of-the-embedding"] = _tie
SQUARE: dict[str, Plant] = {
    "transposed-square": change(attention("o_proj.weight"), lambda v: v.T.contiguous()),
    "transposed-square-of-mtp": change(
        plain("mtp.layers.0.self_attn.o_proj.weight"), lambda v: v.T.contiguous()
    ),
}


def original(tensors: Tensors, hub: str) -> Tensor:
    """Return a tensor's values before they were quantised."""
    artifact = tensors.artifact
    exact = Base(artifact.base.model, "bf16" if artifact.base.gguf else "bf16-split")
    return reading(artifact.workshop.open(exact)).values(hub)


def _from_source(how: Change) -> Plant:
    """Return a fault of a whole encoder: the source's values, changed and encoded."""

    def plant(tensors: Tensors) -> str:
        name = _names(tensors).mlp("up_proj", _names(tensors).full)
        return tensors.store(name, how(original(tensors, name)))

    return plant


def through_fp8(values: Tensor) -> Tensor:
    """Round as an FP8 checkpoint did that was taken for the source."""
    return dequantize_channel(*quantize_channel(values))


def through_int4(values: Tensor) -> Tensor:
    """Round to 15 levels a row."""
    step = values.abs().amax(-1, keepdim=True) / 7
    return (values / step).round() * step


def noisy(relative: float) -> Change:
    """Return a change by noise: another step of training."""

    def how(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        return values * (1 + relative * noise)

    return how


def _other_values() -> Iterator[Fault]:
    """Yield what a right encoder made of wrong values."""
    homes = _among(HOMES)
    exact = _among(tuple(name for name in HOMES if not name.endswith(SEARCHED)))
    searched = _among(tuple(name for name in HOMES if name.endswith(SEARCHED)))
    fp8 = _among(tuple(name for name in HOMES if "fp8" in name or "mixed" in name))
    finer = _among(tuple(n for n in HOMES if not n.endswith(SEARCHED) and not fp8(find_base(n))))
    for name, how in (
        ("through-fp8", through_fp8),
        ("through-int4", through_int4),
        ("noise-of-5-per-cent", noisy(0.05)),
    ):
        yield _fault("source", name, _from_source(how), homes)
    less, little = _from_source(lambda v: 0.99 * v), _from_source(noisy(0.001))
    yield _fault("source", "one-per-cent-less", less, exact)
    yield _fault("source", "one-per-cent-less-searched", less, searched, (FORGED,))
    yield _fault("source", "noise-of-1-per-mille", little, finer)
    for where in (fp8, searched):
        yield _fault("source", "noise-of-1-per-mille-in-few-bits", little, where, (FORGED,))
    yield _fault("source", "a-fine-tune", partial(_fine_tune, ending=""), homes)
    linears = partial(_fine_tune, ending="_proj.weight")
    yield _fault("source", "a-merged-adapter", linears, exact)
    yield _fault("source", "a-merged-adapter-searched", linears, searched, (FORGED,))


def _layers() -> Iterator[Fault]:
    """Yield whole layers and models in the wrong place."""
    two = _among(tuple(name for name in HOMES if not name.startswith("moe")))
    for name, plant in (
        ("two-layers", partial(_swap_layers, part="")),
        ("two-mixers", partial(_swap_layers, part="linear_attn.")),
        ("two-mlps", partial(_swap_layers, part="mlp.")),
    ):
        yield _fault("layers", name, plant, two)
    seeded = _among(UNTIED)
    for name, prefix in (
        ("mtp-of-another-model", "mtp."),
        ("a-layer-of-another-model", "layers.1."),
        ("the-last-norm-of-another-model", "norm."),
        ("the-embedding-of-another-model", "embed_tokens."),
    ):
        yield _fault("layers", name, partial(_transplant, prefix=prefix), seeded)


def hub_names(tensors: Tensors, prefix: str) -> list[str]:
    """Return the hub names of stored weights below a prefix, scales not among them."""
    workshop, model = tensors.artifact.workshop, tensors.artifact.base.model
    whole = reading(workshop.open(Base(model, "bf16-split")))
    names = [name.removeprefix("model.") for name in whole.names()]
    return [name for name in names if name.startswith(prefix)]


def _swap_layers(tensors: Tensors, part: str) -> Names:
    found: list[str] = []
    for name in hub_names(tensors, f"layers.0.{part}"):
        found += tensors.swap(name, name.replace("layers.0.", "layers.1."))
    return tuple(found)


def _transplant(tensors: Tensors, prefix: str) -> Names:
    artifact, found = tensors.artifact, []
    other = reading(artifact.workshop.open(artifact.base, seed=36))
    for name in hub_names(tensors, prefix):
        stored, scale = tensors.stored(name), tensors.scale(name)
        for part in (stored, *([scale.info.name] if scale else ())):
            tensors.entry(part).data[:] = other.entry(part).data
        found.append(stored)
    return tuple(dict.fromkeys(found))


def _fine_tune(tensors: Tensors, ending: str) -> Names:
    """Change every weight of the layers a little; one at least is to be named."""
    names = [name for name in hub_names(tensors, "layers.") if name.endswith(ending)]
    changed = {tensors.store(name, noisy(0.001)(original(tensors, name))) for name in names}
    return "|".join(sorted(changed))
