"""GGUF names and the transforms that llama.cpp expects, both ways, from the family table.

    hub                                      GGUF                        transform
    layers.3.input_layernorm.weight          blk.3.attn_norm.weight      1 + w (all norms but the
    layers.3.linear_attn.norm.weight         blk.3.ssm_norm.weight       delta rule's)
    layers.3.linear_attn.A_log               blk.3.ssm_a                 -exp, value heads tiled
    layers.3.linear_attn.out_proj.weight     blk.3.ssm_out.weight        columns tiled
    layers.3.mlp.experts.7.up_proj.weight    blk.3.ffn_up_exps.weight    entry 7 of the stack
    mtp.layers.0.mlp.up_proj.weight          blk.L.ffn_up.weight         L is num_hidden_layers
    mtp.fc.weight                            blk.L.nextn.eh_proj.weight

Source: llama.cpp's `conversion/qwen.py` at b11434. The trap: with NV > NK value heads are tiled in
seven kinds of tensors, in two of them only from a certain row on, in one along the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from formats.family.arithmetic import AddOne, Float32, NegExp
from formats.family.moves import Squeeze, Tile
from formats.family.ops import Op, undo
from formats.family.rules import EXPERTS_FUSED, EXPERTS_MLX, EXPERTS_SPLIT, MTP, RULES, template

FUSED_EXPERTS = "ffn_gate_up_exps.weight"
# What other writers call a tensor of a layer: Ollama's converter leaves `.bias` out.
ALIASES = {"ssm_dt": "ssm_dt.bias"}
# What stands beside an NVFP4 weight, and what follows the weight's own name in the table.
BESIDE = {".input_scale": "_input_scale", ".scale": "_scale"}


def gguf_name(hub: str, num_layers: int) -> tuple[str, int | None]:
    """Return the GGUF name of a tensor of the table, and its place if it is stacked.

    >>> gguf_name("mtp.layers.0.mlp.experts.7.up_proj.weight", 40)
    ('blk.40.ffn_up_exps.weight', 7)
    """
    key, numbers = template(hub)
    block = _block(key, numbers, num_layers)
    name = RULES[key].gguf
    expert = numbers[1] if len(numbers) > 1 else None
    return (name if block is None else f"blk.{block}.{name}"), expert


def spell(hub: str, num_layers: int) -> str:
    """Return the GGUF name of a tensor of the table; of the vision tower, which has none, its own.

    >>> spell("layers.3.mlp.experts.7.up_proj.weight", 40)
    'blk.3.ffn_up_exps.weight'
    """
    return gguf_name(hub, num_layers)[0] or hub


def _block(key: str, numbers: tuple[int, ...], num_layers: int) -> int | None:
    if key.startswith("layers.#."):
        return numbers[0]
    if key.startswith("mtp."):
        return num_layers + (numbers[0] if numbers else 0)
    return None


def hub_name(name: str, num_layers: int, *, fused: bool) -> str:
    """Return the table's name of a GGUF tensor; one that the table cannot have if it has none.

    fused  gate and up of the experts are one tensor in this file
    """
    for ending, part in BESIDE.items():
        if name.endswith(ending):
            weight = name.removesuffix(ending) + ".weight"
            return hub_name(weight, num_layers, fused=fused) + part
    key, numbers = template(name)
    tops, layers, heads = _hub_names(fused=fused)
    strange = f"gguf.{name}"
    if not key.startswith("blk.#."):
        return tops.get(key, strange)
    rest, block = key.removeprefix("blk.#."), numbers[0]
    rest = ALIASES.get(rest, rest)
    if rest in heads and block == num_layers:
        return heads[rest]
    if rest not in layers or len(numbers) > 1:
        return strange
    prefix = f"layers.{block}." if block < num_layers else f"mtp.layers.{block - num_layers}."
    return prefix + layers[rest]


@cache
def _hub_names(*, fused: bool) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return GGUF name -> hub name of the top, of a layer and of the MTP head."""
    split = {rule.hub for rule in EXPERTS_SPLIT}
    other = {rule.hub for rule in (EXPERTS_MLX if fused else EXPERTS_FUSED)}
    layers = {
        rule.gguf: rule.hub.removeprefix("layers.{i}.")
        for rule in RULES.values()
        if rule.gguf and rule.hub.startswith("layers.{i}.")
        if rule.hub.removeprefix("layers.{i}.") not in split | other
    }
    tops = {
        rule.gguf: rule.hub
        for key, rule in RULES.items()
        if rule.gguf and not key.startswith(("layers.", "mtp."))
    }
    return tops, layers, {rule.gguf: rule.hub for rule in MTP}


def ops_to_gguf(role: str, sizes: Mapping[str, int]) -> tuple[Op, ...]:
    """Return what turns the hub's tensor of this role into GGUF's."""
    return (*_tile(role, sizes), *VALUES.get(role, ()))


def ops_from_gguf(role: str, sizes: Mapping[str, int]) -> tuple[Op, ...]:
    """Return what turns GGUF's tensor of this role into the hub's: the same, undone."""
    return undo(ops_to_gguf(role, sizes))


# What is done to the values, after the heads are tiled.
VALUES: dict[str, tuple[Op, ...]] = {
    "norm": (Float32(), AddOne()),
    "A_log": (NegExp(),),
    "conv1d": (Squeeze(1),),
}


def _tile(role: str, sizes: Mapping[str, int]) -> tuple[Tile, ...]:
    """Return how the value heads of this role are tiled; none without more values than keys."""
    heads, ratio = sizes["NK"], sizes["NV"] // sizes["NK"]
    keys = 2 * heads * sizes["DK"]
    places = {
        "in_proj_qkv": (sizes["DV"], keys, 0),
        "conv1d": (sizes["DV"], keys, 0),
        "in_proj_z": (sizes["DV"], 0, 0),
        "out_proj": (sizes["DV"], 0, 1),
        "in_proj_a": (1, 0, 0),
        "in_proj_b": (1, 0, 0),
        "A_log": (1, 0, 0),
        "dt_bias": (1, 0, 0),
    }
    if ratio == 1 or role not in places:
        return ()
    return (Tile(heads, ratio, *places[role]),)
