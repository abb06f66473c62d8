"""What a forward pass begins with: the embeddings of its tokens, and the angles of their places.

Chosen for: every batch of a whole model.

    x = embed[id]        cos, sin = those of rope

One kernel for a look-up and the angles. It is not launched early: what kernels before it have
written (ids, slots and lengths, states, keys and values) is complete once it begins, so the layers
after it may read that before they wait. It lets the next one start at once.

Formula and source of the angles: see attention.rope.

Shape letters: T tokens, V vocabulary, H hidden size, r rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from runtime.kernels.attention.frequencies import attention_factor, frequencies
from runtime.kernels.attention.rope import rope_cos_sin_reference, store_angles
from runtime.kernels.launch import jit, power_of_two, tl, use_triton
from runtime.kernels.overlap import start_next

if TYPE_CHECKING:
    from torch import Tensor

    from formats.family.rope import Scaling

_BLOCK, _ANGLES = 1024, 256


def embed_tokens_reference(
    ids_T: Tensor,
    positions_T: Tensor,
    embed_VH: Tensor,
    rd: int,
    theta: float,
    scaling: Scaling | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Say what `embed_tokens` computes, in plain torch."""
    dtype = embed_VH.dtype
    angles = rope_cos_sin_reference(positions_T, rd, theta, None, dtype, scaling)
    return F.embedding(ids_T, embed_VH), angles


def embed_tokens(
    ids_T: Tensor,
    positions_T: Tensor,
    embed_VH: Tensor,
    rd: int,
    theta: float,
    scaling: Scaling | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return (x [T, H], (cos, sin) [T, r] each), all in the dtype of the embedding.

    ids_T          [T] int64, all in the vocabulary
    positions_T    [T] int64: text has one for each token
    embed_VH       rows contiguous in themselves
    rd, theta      as `rope_cos_sin` takes them, as scaling
    """
    assert ids_T.is_contiguous(), "ids one after another"
    assert positions_T.is_contiguous(), "positions one after another"
    assert embed_VH.stride(1) == 1, "rows must be contiguous"
    if not use_triton(embed_VH):
        return embed_tokens_reference(ids_T, positions_T, embed_VH, rd, theta, scaling)
    (tokens,), hidden, r = ids_T.shape, embed_VH.shape[1], rd // 2
    frequency_r, _ = frequencies(rd, theta, None, embed_VH.device, scaling)
    x_TH = embed_VH.new_empty((tokens, hidden))
    cos_Tr, sin_Tr = (embed_VH.new_empty((tokens, r)) for _ in range(2))
    block = min(power_of_two(hidden), _BLOCK)
    columns, first = -(-hidden // block), -(-tokens * r // _ANGLES)
    _tokens_kernel[(first + tokens * columns,)](
        ids_T,
        positions_T,
        embed_VH,
        frequency_r,
        x_TH,
        cos_Tr,
        sin_Tr,
        attention_factor(scaling),
        tokens,
        hidden,
        embed_VH.stride(0),
        first,
        columns,
        R=r,
        ANGLES=_ANGLES,
        BLOCK=block,
        num_warps=4,
    )
    return x_TH, (cos_Tr, sin_Tr)


@jit
def _tokens_kernel(
    ids,
    positions,
    embed,
    frequency,
    x,
    cos,
    sin,
    factor,
    T,
    H,
    embed_row,
    first,
    columns,
    R: tl.constexpr,
    ANGLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute some angles, whose programs come first, or copy columns of one row."""
    start_next()
    program = tl.program_id(0)
    if program < first:
        at = program * ANGLES + tl.arange(0, ANGLES)
        inside = at < T * R
        position = tl.load(positions + at // R, mask=inside, other=0)
        step = tl.load(frequency + at % R, mask=inside, other=0.0)
        store_angles(cos + at, sin + at, position, step, factor, inside)
    else:
        row = ((program - first) // columns).to(tl.int64)
        i = (program - first) % columns * BLOCK + tl.arange(0, BLOCK)
        source = embed + tl.load(ids + row) * embed_row + i
        tl.store(x + row * H + i, tl.load(source, mask=i < H, other=0.0), mask=i < H)
