"""Super-blocks of 256 columns, as many at a time as a core's cache holds, as float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quant.ggml import k_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Batch = tuple[NDArray[Any], np.uint64, NDArray[Any]]
    Decode = Callable[[NDArray[Any], NDArray[Any]], object]

SUPER = 256
NUM_SUPER = 128


def batches(x_NK: NDArray[Any], out: NDArray[Any], together: int) -> Iterator[Batch]:
    """Yield super-blocks [.., 256], the number of the first one, and where their bytes belong.

    x_NK      [N, K] float32, or uint16, the bits of bfloat16
    out       uint8 [N, row_bytes], contiguous
    together  as many are encoded at once; those that fill up the last ones belong to no row
    """
    assert out.flags.c_contiguous, "super-blocks would be written to a copy"
    assert x_NK.shape[1] % SUPER == 0, f"rows of {x_NK.shape[1]} are not super-blocks"
    assert NUM_SUPER % together == 0, "encoders would see super-blocks of two batches"
    num_super = x_NK.size // SUPER
    source = np.ascontiguousarray(x_NK).reshape(num_super, SUPER)
    source = source.view(np.uint32) if source.dtype == np.float32 else source
    rows = out.reshape(num_super, -1) if num_super else out[:0]
    w = np.zeros((min(NUM_SUPER, _whole(num_super, together)), SUPER), np.float32)
    for first in range(0, num_super, NUM_SUPER):
        stop = min(first + NUM_SUPER, num_super)
        k_decode.widen(source[first:stop], w)
        yield w[: _whole(stop - first, together)], np.uint64(first), rows[first:stop]


def decode_super_blocks(data: NDArray[Any], out: NDArray[Any], decode: Decode) -> None:
    """Fill out, float32 [N, K] and contiguous, with the values of data, uint8 [N, row_bytes].

    decode  takes super-blocks [B, bytes], and fills in their values [B, 256]
    """
    assert out.flags.c_contiguous, "values would be written to a copy"
    num_super = out.size // SUPER
    if num_super:
        decode(np.ascontiguousarray(data).reshape(num_super, -1), out.reshape(num_super, SUPER))


def _whole(count: int, together: int) -> int:
    return -(-count // together) * together
