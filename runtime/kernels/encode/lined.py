"""Rows of x with their columns lined up with the words of an NVFP4 weight.

Chosen for: inputs of linear.packed_roles, alone or within the kernel that makes the rows.

What a thread decodes of eight words comes as it lies in them; the tensor cores want it in an order
of theirs. So the columns of x go where those of the weight are, within each chunk of 256:

    column   i + 2 p + 8 q + 16 v + 32 u + 64 t      p and t are below 4, the others below 2
    place    i + 2 t + 8 v + 16 u + 32 p + 128 q

Shape letters: M rows of x, K columns, C chunks of 256 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.kernels.launch import gluon_jit, jit, tl
from runtime.kernels.overlap import early, start_next, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 256
_AT_ONCE = 1024


class Lined(NamedTuple):
    """Rows that are lined up.

    values  [M, C * 256], zeros beyond K
    """

    values: Tensor

    @staticmethod
    def room(num_rows: int, columns: int, like: Tensor) -> Lined:
        """Return room that a kernel which makes the rows fills, in the dtype of `like`."""
        make = torch.empty if columns % _CHUNK == 0 else torch.zeros
        width = -(-columns // _CHUNK) * _CHUNK
        return Lined(make((num_rows, width), dtype=like.dtype, device=like.device))


def lined_up_reference(x_MK: Tensor) -> Tensor:
    """Say what `lined_up` computes, in plain torch."""
    x = torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % _CHUNK)).unflatten(1, (-1, _CHUNK))
    x = x.unflatten(2, (4, 2, 2, 2, 4, 2))  # t, u, v, q, p, i
    lined: Tensor = x.permute(0, 1, 5, 6, 3, 4, 2, 7).reshape(len(x_MK), -1)
    return lined


def lined_up(x_MK: Tensor) -> Lined:
    """Return rows of K columns, contiguous in themselves, lined up."""
    m, k = x_MK.shape
    out = Lined.room(m, k, x_MK)
    _lined_kernel[(m, -(-k // _AT_ONCE))](
        x_MK,
        out.values,
        k,
        x_MK.stride(0),
        out.values.stride(0),
        BLOCK=_AT_ONCE,
        num_warps=4,
        **early(),
    )
    return out


def _place(column):
    """Return where a column of x lies."""
    at = column % 2 + column // 64 % 4 * 2 + column // 16 % 2 * 8 + column // 32 % 2 * 16
    return at + column // 2 % 8 * 32 + column // 256 * 256


place, gluon_place = jit(_place), gluon_jit(_place)


@jit
def _lined_kernel(x, out, K, x_row, width, BLOCK: tl.constexpr):
    start_next()
    wait_for_inputs()
    m = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + m * x_row + k, mask=k < K, other=0.0)
    tl.store(out + m * width + place(k), value, mask=k < K)
