"""How a checkpoint spells the family: the hub's way, MLX's or GGUF's.

A dialect says which shape a tensor has in the file, and which operations turn the stored tensor
into the hub's: MLX moves the axes of convolutions and stores 1 + w for norms, GGUF does what
`gguf_names` lists. Names are translated before, so that all three meet in one table.
"""

from __future__ import annotations

from collections.abc import Mapping

from formats.family.config import Config
from formats.family.ops import AddOne, Op, Permute, Shape, Squeeze, Unsqueeze
from formats.family.rules import Slot, template
from formats.gguf.names import FUSED_EXPERTS, hub_name, ops_from_gguf
from formats.safetensors.names import Problem, rename
from formats.tensor import TensorInfo

HUB_DIALECT, MLX, GGUF = "hub", "mlx", "gguf"
MLX_CONV1D = (0, 2, 1)
MLX_CONV3D = (0, 4, 1, 2, 3)


def dialect_of(held: Mapping[str, TensorInfo], config: Config) -> str:
    """Return hub or mlx. MLX moves the conv1d axes; that, not a name, says that norms hold 1 + w.

    `held` maps the table's names to what is stored.
    """
    moved = (config.sizes["K"], 1)
    key = "layers.#.linear_attn.conv1d.weight"
    convs = [info for hub, info in held.items() if template(hub)[0] == key]
    moved_all = all(info.shape[1:] == moved for info in convs)
    return MLX if convs and moved_all and moved != (1, 1) else HUB_DIALECT


def rename_gguf(
    infos: Mapping[str, TensorInfo], num_layers: int
) -> tuple[dict[str, str], list[Problem]]:
    """Map each table name to its name in a GGUF file."""
    fused = any(name.endswith("." + FUSED_EXPERTS) for name in infos)
    stored = {name: hub_name(name, num_layers, fused=fused) for name in infos}
    renamed, problems = rename(stored.values())
    found = {hub: name for name, hub in stored.items()}
    return {hub: found[name] for hub, name in renamed.items()}, problems


def stored_shape(slot: Slot, info: TensorInfo, dialect: str) -> Shape:
    """Return the shape that the slot's tensor must have in the file."""
    role, shape = slot.rule.role, slot.shape
    if dialect == GGUF:
        flat = role == "conv1d" or (role == "shared_expert_gate" and len(info.shape) == 1)
        return Squeeze(1 if role == "conv1d" else 0).shape(shape) if flat else shape
    if dialect == MLX and role == "conv1d":
        return Permute(MLX_CONV1D).inverse().shape(shape)
    moved = Permute(MLX_CONV3D).inverse().shape(shape) if len(shape) == 5 else shape
    return moved if dialect == MLX and info.shape == moved else shape


def ops_to_hub(
    role: str, slot: Slot, info: TensorInfo, dialect: str, sizes: Mapping[str, int]
) -> tuple[Op, ...]:
    """Return what turns the stored tensor, or an atom cut out of it, into the hub's."""
    if dialect == GGUF:
        flat = role == "shared_expert_gate" and len(info.shape) == 1
        return (Unsqueeze(0),) if flat else ops_from_gguf(role, sizes)
    if dialect == HUB_DIALECT:
        return ()
    if role == "norm":
        return (AddOne(-1),)
    if role == "conv1d":
        return (Permute(MLX_CONV1D),)
    moved = len(info.shape) == 5 and info.shape != slot.shape
    return (Permute(MLX_CONV3D),) if moved else ()
