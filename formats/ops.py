"""What happens to a tensor between two layouts: small frozen operations with shape algebra.

`shape(s)` says at planning time what `apply(t)` will have; both raise nothing for shapes that the
family table has passed. Selections are views (no byte is read); `Regroup` copies.
`inverse()` exists where no element is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


@dataclass(frozen=True, slots=True)
class Unstack:
    """Take one of stacked tensors: [E, ...] -> [...]."""

    index: int

    def shape(self, shape: Shape) -> Shape:
        """Drop the leading axis."""
        return shape[1:]

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        return tensor[self.index]


@dataclass(frozen=True, slots=True)
class Rows:
    """Take rows start to stop: [R, ...] -> [stop - start, ...]. Gate is first in gate_up."""

    start: int
    stop: int

    def shape(self, shape: Shape) -> Shape:
        """Replace the leading axis."""
        return (self.stop - self.start, *shape[1:])

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        return tensor[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Regroup:
    """Undo a grouping by head: rows [head][piece] -> [piece][head], for the pieces in `keep`.

    Qwen3-Next stores q, k, v, z of key head 0, then of head 1, ...; Qwen3.5 stores all q, all k,
    ... `widths` are the rows of each piece of one head.
    """

    heads: int
    widths: tuple[int, ...]
    keep: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """Count the rows that are kept."""
        return (self.heads * sum(self.widths[i] for i in self.keep), *shape[1:])

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        import torch

        rest = tensor.shape[1:]
        by_head = tensor.reshape(self.heads, sum(self.widths), *rest)
        pieces = torch.split(by_head, list(self.widths), dim=1)
        return torch.cat([pieces[i].reshape(-1, *rest) for i in self.keep])


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorder axes; `inverse` puts them back."""

    axes: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        """Reorder the sizes."""
        return tuple(shape[axis] for axis in self.axes)

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return tensor.permute(self.axes).contiguous()

    def inverse(self) -> Permute:
        """Return the permutation that undoes this one."""
        return Permute(tuple(self.axes.index(i) for i in range(len(self.axes))))


@dataclass(frozen=True, slots=True)
class AddOne:
    """Shift a zero-centred norm: w -> w + sign. MLX and GGUF store 1 + w."""

    sign: int = 1

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        """Add in float32, return in the tensor's type (exact for a stored 1 + w near 1)."""
        return (tensor.float() + self.sign).to(tensor.dtype)

    def inverse(self) -> AddOne:
        """Shift the other way."""
        return AddOne(-self.sign)


def apply_all(ops: tuple[Op, ...], tensor: Tensor) -> Tensor:
    """Apply the operations in order."""
    for op in ops:
        tensor = op.apply(tensor)
    return tensor


def shape_after(ops: tuple[Op, ...], shape: Shape) -> Shape:
    """Return the shape that `apply_all` gives."""
    for op in ops:
        shape = op.shape(shape)
    return shape
