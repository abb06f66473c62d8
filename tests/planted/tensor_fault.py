"""What faults of tensors are made of: a change of values, a swap, in an artifact that is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.planted.artifact import Artifact
from tests.planted.edit import Tensors, editing
from tests.planted.fault import Fault, Names, Where

Change = Callable[[Tensor], Tensor]
Plant = Callable[[Tensors], Names]


def tensor_fault(kind: str, name: str, plant: Plant, where: Where, **more: Any) -> Fault:
    """Return a fault that is planted into opened tensors; they are written back."""

    def apply(artifact: Artifact) -> Names:
        with editing(artifact) as tensors:
            return plant(tensors)

    return Fault(kind, name, apply, where, **more)


def change(hub: str, how: Change) -> Plant:
    """Return a fault that changes one tensor's values."""
    return lambda tensors: tensors.store(hub, how(tensors.values(hub)))


def swap(one: str, two: str) -> Plant:
    """Return a fault that swaps two tensors' values."""
    return lambda tensors: tensors.swap(one, two)


def rows_swapped(values: Tensor) -> Tensor:
    """Swap two rows."""
    values[[7, 8]] = values[[8, 7]]
    return values


def row_zeroed(values: Tensor) -> Tensor:
    """Lose a row."""
    values[3] = 0
    return values
