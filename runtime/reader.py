"""A checkpoint's weights on a device, in a dtype, each decoded or in the form that kernels take.

Several that share their input are read as one, joined along their rows. FP8 weights are decoded,
codes * scale rounded once to the dtype, or with `keep_fp8` stay codes and scales where they can:
see load_fp8. With it, weights of four bits are packed: see load_packed. A_log, dt_bias and the norm
of the delta rule stay float32 where the checkpoint has float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.family.roles import ROLES
from quant.opening import open_value
from quant.stored import Value
from runtime.joined import fill, joined_shape
from runtime.kernels.linear.weight import Fp8Weight, Weight
from runtime.load_fp8 import fp8_weight, scale_edge
from runtime.load_packed import pack, packed_group, takes_packed

Change = Callable[[Value], Value]


@dataclass(frozen=True)
class Reader:
    """Reads weights by the names of the family table.

    keep_fp8     FP8 weights stay codes and scales, those of four bits are packed
    dynamic_fp8  inputs of more than 16 rows are quantised too
    change       gives what is read in place of a tensor; None: all are as they are stored
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    keep_fp8: bool = False
    dynamic_fp8: bool = False
    change: Change | None = None

    def tensor(self, *names: str) -> Tensor:
        """Return the named tensors as one, decoded, joined along their rows."""
        values = [self.open(name) for name in names]
        out = self._empty(joined_shape(values), self._dtype_of(values[0]))
        fill(out, values)
        return out

    def linear(self, *names: str) -> Weight:
        """Return the weights of linears with one input as one, in FP8 or four bits if kept."""
        edge, values = self.edge(names), [self.open(name) for name in names]
        if self._packs([values]):
            return pack(joined_shape(values), [values], self.device)
        if edge is None:
            return self.tensor(*names)
        return self._fp8(joined_shape(values), edge, [values])

    def _packs(self, groups: Iterable[Sequence[Value]]) -> bool:
        """Return whether weights are packed in four bits."""
        kept = self.keep_fp8 and takes_packed(self.device, self.dtype)
        return kept and packed_group(value for values in groups for value in values) is not None

    def open(self, name: str) -> Value:
        """Open one tensor for reading."""
        value = open_value(self.checkpoint, self.checkpoint.layout.atoms[name])
        return value if self.change is None else self.change(value)

    def rows(self, value: Value, index: Tensor) -> Tensor:
        """Return chosen rows of a tensor, decoded."""
        return value.pick(index.cpu()).to(self.device, self.dtype)

    def strip(self, value: Value, start: int, stop: int) -> Tensor:
        """Return rows start to stop of a tensor, decoded."""
        return value.exact(start, stop).to(self.device, self.dtype)

    def stack(self, groups: Sequence[tuple[str, ...]]) -> Weight:
        """Return one weight for each group of names, stacked: [E, N, K]."""
        edges = {self.edge(names) for names in groups}
        edge = edges.pop() if len(edges) == 1 else None
        shape = (len(groups), *joined_shape([self.open(name) for name in groups[0]]))
        opened = [[self.open(name) for name in names] for names in groups]
        if self._packs(opened):
            return pack(shape, opened, self.device)
        if edge is not None:
            return self._fp8(shape, edge, opened)
        out = self._empty(shape, self.dtype)
        for one, values in zip(out, opened, strict=True):
            fill(one, values)
        return out

    def edge(self, names: tuple[str, ...]) -> int | None:
        """Return how many rows share a scale in a weight that stays FP8; None: it is decoded."""
        return scale_edge([self.open(name) for name in names]) if self.keep_fp8 else None

    def _fp8(
        self, shape: tuple[int, ...], edge: int, groups: Sequence[Sequence[Value]]
    ) -> Fp8Weight:
        return fp8_weight(shape, edge, groups, self.device, dynamic=self.dynamic_fp8)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _dtype_of(self, value: Value) -> torch.dtype:
        wide = ROLES[value.atom.role].f32 and value.atom.dtype == "F32"
        return torch.float32 if wide else self.dtype
