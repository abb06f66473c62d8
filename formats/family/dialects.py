"""How a checkpoint spells the family: the hub's way or MLX's; GGUF's stands in `formats.gguf`.

A dialect says which shape a tensor has in the file, and which operations turn the stored tensor
into the hub's: MLX moves the axes of convolutions and stores 1 + w for norms. Names are translated
before, so that all meet in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from formats.family.arithmetic import AddOne
from formats.family.config import Config
from formats.family.moves import Permute
from formats.family.names import place_beside, prefixes, rename
from formats.family.ops import Op, Shape
from formats.family.rules import template
from formats.family.slots import Slot
from formats.stored import Problem
from formats.tensor import TensorInfo

HUB_DIALECT, MLX = "hub", "mlx"
CONV1D = "layers.#.linear_attn.conv1d.weight"
MLX_CONV1D = (0, 2, 1)
MLX_CONV3D = (0, 4, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Words:
    """What messages say where dialects differ.

    missing  what to do where a tensor is missing
    strange  where one has no place
    shape    where one has another shape
    """

    missing: str
    strange: str
    shape: str


HUB_WORDS = Words(
    missing="no file is short, so it was lost when the model was saved: save it again, or convert "
    "the model that it was made from",
    strange="remove it, or correct config.json",
    shape="use the config.json that belongs to these tensors",
)


class Dialect(Protocol):
    """One way to spell the family."""

    @property
    def kind(self) -> str:
        """What a layout of this dialect is called."""
        ...

    @property
    def words(self) -> Words:
        """What messages say."""
        ...

    def rename(
        self, infos: Mapping[str, TensorInfo], config: Config
    ) -> tuple[dict[str, str], list[Problem]]:
        """Map each name of the table to its stored name; two stored names for one are a problem."""
        ...

    def spelling(self, names: Mapping[str, str], config: Config) -> Callable[[str], str]:
        """Return what gives the name that a tensor of the table has, or would have, in the file.

        names  stored names by names of the table
        """
        ...

    def stored_shape(self, slot: Slot, shape: Shape) -> Shape:
        """Return the shape that the slot's tensor must have in the file, where it has `shape`."""
        ...

    def ops_to_hub(
        self, role: str, slot: Slot, shape: Shape, sizes: Mapping[str, int]
    ) -> tuple[Op, ...]:
        """Return what turns the tensor of this stored shape, or an atom of it, into the hub's."""
        ...


def dialect_of(held: Mapping[str, TensorInfo], config: Config) -> Dialect:
    """Return hub or MLX. MLX moves the conv1d axes; that, not a name, says that norms hold 1 + w.

    `held` maps the table's names to what is stored.
    """
    moved = (config.sizes["K"], 1)
    convs = [info for hub, info in held.items() if template(hub)[0] == CONV1D]
    moved_all = all(info.shape[1:] == moved for info in convs)
    return MlxDialect() if convs and moved_all and moved != (1, 1) else HubDialect()


class _Namespaced:
    """Names as the table has them, inside namespaces."""

    __slots__ = ()

    def rename(
        self, infos: Mapping[str, TensorInfo], _config: Config
    ) -> tuple[dict[str, str], list[Problem]]:
        """Strip the namespaces."""
        return rename(infos)

    def spelling(self, names: Mapping[str, str], _config: Config) -> Callable[[str], str]:
        """Put a tensor into the namespace of those that are stored."""
        return partial(place_beside, prefixes(names.values()))


@dataclass(frozen=True, slots=True)
class HubDialect(_Namespaced):
    """The way of the hub: what the table says."""

    kind: str = HUB_DIALECT
    words: Words = HUB_WORDS

    def stored_shape(self, slot: Slot, _shape: Shape) -> Shape:
        """Return the table's shape."""
        return slot.shape

    def ops_to_hub(
        self, _role: str, _slot: Slot, _shape: Shape, _sizes: Mapping[str, int]
    ) -> tuple[Op, ...]:
        """Return nothing to do."""
        return ()


@dataclass(frozen=True, slots=True)
class MlxDialect(_Namespaced):
    """MLX's way: convolutions with channels last, norms shifted."""

    kind: str = MLX
    words: Words = HUB_WORDS

    def stored_shape(self, slot: Slot, shape: Shape) -> Shape:
        """Return the shape with moved axes; a patch embedding may have kept the hub's."""
        if slot.rule.role == "conv1d":
            return Permute(MLX_CONV1D).inverse().shape(slot.shape)
        if len(slot.shape) != 5:
            return slot.shape
        moved = Permute(MLX_CONV3D).inverse().shape(slot.shape)
        return moved if shape == moved else slot.shape

    def ops_to_hub(
        self, role: str, slot: Slot, shape: Shape, _sizes: Mapping[str, int]
    ) -> tuple[Op, ...]:
        """Return what moves the axes back, or takes the 1 off."""
        if role == "norm":
            return (AddOne(-1),)
        if role == "conv1d":
            return (Permute(MLX_CONV1D),)
        moved = len(shape) == 5 and shape != slot.shape
        return (Permute(MLX_CONV3D),) if moved else ()
