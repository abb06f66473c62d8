"""Operations that take, drop and reorder entries of a tensor; no value changes.

Selections are views (no byte is read); `Regroup`, `Tile` and `Permute` copy. `VIEWS` cut along the
leading axes and so may be applied to tensors whose rows are still encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from formats.family.ops import Shape


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
class Tile:
    """Swap the two factors of a grouped axis: [outer][inner][width] -> [inner][outer][width].

    GGUF tiles the value heads: head g*r + j of key head g goes to place j*NK + g, because ggml
    repeats key heads as a whole. The first `start` entries of the axis stay.
    """

    outer: int
    inner: int
    width: int
    start: int = 0
    axis: int = 0

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def order(self) -> Tensor:
        """Return which entry of the axis comes to each place, int64."""
        import torch

        moved = torch.arange(self.outer * self.inner * self.width)
        moved = moved.view(self.outer, self.inner, self.width).transpose(0, 1).reshape(-1)
        return torch.cat([torch.arange(self.start), moved + self.start])

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.index_select(self.axis, self.order())

    def inverse(self) -> Tile:
        """Return the swap back: with three value heads to a key head it is another one."""
        return Tile(self.inner, self.outer, self.width, self.start, self.axis)


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
class Squeeze:
    """Drop an axis of length 1: conv1d [C, 1, K] -> [C, K]."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        """Leave the axis out."""
        return shape[: self.axis] + shape[self.axis + 1 :]

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        return tensor.squeeze(self.axis)

    def inverse(self) -> Unsqueeze:
        """Return the step back."""
        return Unsqueeze(self.axis)


@dataclass(frozen=True, slots=True)
class Unsqueeze:
    """Put in an axis of length 1."""

    axis: int

    def shape(self, shape: Shape) -> Shape:
        """Put a 1 in."""
        return (*shape[: self.axis], 1, *shape[self.axis :])

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        return tensor.unsqueeze(self.axis)

    def inverse(self) -> Squeeze:
        """Return the step back."""
        return Squeeze(self.axis)


@dataclass(frozen=True, slots=True)
class Take:
    """Take one entry of an axis: a frame of the patch embedding [O, C, T, P, P] -> [O, C, P, P]."""

    axis: int
    index: int

    def shape(self, shape: Shape) -> Shape:
        """Leave the axis out."""
        return shape[: self.axis] + shape[self.axis + 1 :]

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        return tensor.select(self.axis, self.index)


VIEWS = (Unstack, Rows)
