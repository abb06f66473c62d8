"""Which of ggml's types a GPU encodes, and with what: to the byte what `quant.ggml.codec` writes.

Chosen for: `convert --device cuda` to GGUF; of the rest, types go to the CPU.

Shape letters: N rows, K columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from quant.ggml import codec, kinds
from runtime.kernels.encode.i_quants import encode_i
from runtime.kernels.encode.k_quants import encode_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Encoder(NamedTuple):
    """What encodes a type on a GPU.

    call      of (name, w_NK, importance)
    weighted  whether it knows an importance
    """

    call: Callable[[str, Tensor, Tensor | None], Tensor]
    weighted: bool


ENCODERS = {
    "Q4_K": Encoder(encode_k, weighted=False),
    "Q6_K": Encoder(encode_k, weighted=False),
    **dict.fromkeys(kinds.I_QUANTS, Encoder(encode_i, weighted=True)),
}


def encodes(name: str, importance: Tensor | None) -> bool:
    """Return whether a GPU encodes this type, with this importance."""
    encoder = ENCODERS.get(name)
    return encoder is not None and (importance is None or encoder.weighted)


def encode(name: str, w_NK: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the blocks of a weight, uint8 [N, row_bytes].

    name        one that `encodes`
    w_NK        [N, K] float, contiguous
    importance  [K] float32, what an error of each column weighs

    Raises QuantError as `codec.encode` does: for a weight that holds a NaN or an infinity, and for
    one whose scale is beyond float16; or if the importance is none.
    """
    weights = None
    if importance is not None:
        known = codec.weights_of(name, importance.cpu(), w_NK.shape[1])
        weights = torch.as_tensor(known, device=w_NK.device)
    if not (w_NK.abs() < codec.LARGEST).all():
        codec.refuse(name, w_NK)
    blocks = ENCODERS[name].call(name, w_NK, weights)
    if not _finite(name, blocks):
        codec.refuse(name, w_NK)
    return blocks


def _finite(name: str, blocks: Tensor) -> bool:
    """Return whether every scale is finite."""
    rows = blocks.view(-1, kinds.block(name)[1])
    return all(
        bool(rows[:, at : at + 2].contiguous().view(torch.float16).isfinite().all())
        for at in kinds.SUPER_BLOCKS[name]
    )
