"""What changes values of a checkpoint while they are read: an adapter that is merged.

A tensor that an overlay changes is read as one without bytes, like one that lies far away
(`formats.remote`); its rows get their values when they are loaded. So whatever forgets to load
fails loudly, it cannot take the values of before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from formats.remote import Index


class Overlay(Protocol):
    """Who changes the values, and what from."""

    @property
    def folder(self) -> Path:
        """Where its files are."""
        ...

    @property
    def files(self) -> Mapping[str, Path]:
        """The files that it was made from by name."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The stored tensors whose values it changes."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds at most while it changes rows, in each thread."""
        ...

    def change(self, name: str, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return rows of a stored tensor with the values they are to have.

        rows     [..., width] as stored; of a vector each element is a row
        numbers  int64 [rows.numel() / width]: which row of the whole tensor each of them is
        """
        ...


def without_bytes(data: Tensor) -> Tensor:
    """Return a tensor of this shape and type on the meta device."""
    import torch

    return torch.empty(data.shape, dtype=data.dtype, device="meta")


def same_view(whole: Tensor, view: Tensor) -> Tensor:
    """Return of a tensor what `view` is of its twin without bytes, cut along leading axes."""
    assert view.is_contiguous(), "a tensor is cut along its leading axes only"
    start = int(view.storage_offset())
    return whole.reshape(-1)[start : start + view.numel()].view(view.shape)


def row_numbers(view: Tensor, index: Index) -> Tensor:
    """Return the number in the whole tensor of each row that `view[index]` has, int64 in order.

    view  a cut along leading axes of a tensor without bytes
    """
    import torch

    width = view.shape[-1] if view.dim() > 1 else 1
    first, lead = int(view.storage_offset()) // width, view.shape[: max(1, view.dim() - 1)]
    count = view.numel() // width
    return torch.arange(first, first + count).view(lead)[index].reshape(-1)
