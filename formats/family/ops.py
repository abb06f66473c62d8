"""What happens to a tensor between two layouts: small frozen operations with shape algebra.

`shape(s)` says at planning time what `apply(t)` will have; both raise nothing for shapes that the
family table has passed. `moves` has the operations that take and reorder entries, `arithmetic`
those that compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Op(Protocol):
    """One step of a tensor from its stored form to ours."""

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the result."""
        ...

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the result."""
        ...


@runtime_checkable
class Invertible(Op, Protocol):
    """A step by which no element is lost."""

    def inverse(self) -> Op:
        """Return the step back."""
        ...


def apply_all(ops: tuple[Op, ...], tensor: Tensor) -> Tensor:
    """Apply the operations in order."""
    for op in ops:
        tensor = op.apply(tensor)
    return tensor


def undo(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Return the operations that take the result of `ops` back. TypeError if one loses elements."""
    inverses = []
    for op in reversed(ops):
        if not isinstance(op, Invertible):
            raise TypeError(f"{op} has no inverse")
        inverses.append(op.inverse())
    return tuple(inverses)


def shape_after(ops: tuple[Op, ...], shape: Shape) -> Shape:
    """Return the shape that `apply_all` gives."""
    for op in ops:
        shape = op.shape(shape)
    return shape
