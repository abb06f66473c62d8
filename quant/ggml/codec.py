"""ggml's types: the bytes of rows in every type that llama-quantize writes, and back.

    encode    float rows -> blocks, to the byte what ggml's C writes, imatrix included
    decode    blocks -> float32, also of types that only others write
    outside   how many weights came back farther off than their type allows

`kinds` lists the types. A row is encoded by itself, on one thread, without the interpreter's lock:
callers cut a weight by rows and bring threads. Where ggml's C and the encoders of the `gguf`
package differ (the sign of a zero scale), C is followed.

Importing this module imports neither torch nor numba nor gguf.

Shape letters: N rows (outputs), K columns (inputs), B bytes of a row.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from quant.errors import QuantError
from quant.ggml.kinds import (
    BOUNDED,
    CASTS,
    I_QUANTS,
    LOOPS,
    SEARCHED,
    SUPER_BLOCKS,
    UNWEIGHTED,
    WRITABLE,
    block,
    row_bytes,
    writable,
)

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray
    from torch import Tensor

# Beyond float16 scales of every super-block, and below where a search's sums overflow.
LARGEST = 2.0**32
SEARCHED_ROWS = 64  # that are widened to float32 at once
# Columns that a loop encodes at once: 32 of all others.
LANES = {"NVFP4": 64}


def encode(
    name: str, w_NK: Tensor, *, importance: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return the blocks of a weight, uint8 [N, B].

    w_NK     [N, K] bfloat16, float16 or float32 on the CPU
    importance  [K] float32, what an error of each column weighs: an imatrix's mean squares, not
             negative. ggml uses none for Q8_0, MXFP4, NVFP4 and the plain types; without one the
             columns of IQ2_XXS and IQ2_XS weigh alike
    out      if given, where the blocks go: uint8 [N, B], contiguous

    Raises QuantError for a type that cannot be written, for rows that are not whole blocks, for a
    weight that holds a NaN or an infinity, and for one whose scale is beyond float16.
    """
    import torch

    if name not in WRITABLE:
        block(name)
        raise QuantError(f"{name} cannot be written,\n  expected {writable()}")
    shape = (w_NK.shape[0], row_bytes(name, w_NK.shape[1]))
    blocks = torch.empty(shape, dtype=torch.uint8) if out is None else out
    assert blocks.shape == shape, f"room of {list(blocks.shape)} for blocks of {list(shape)}"
    assert blocks.is_contiguous(), "blocks would be written to a copy"
    weights = None if importance is None else weights_of(name, importance, w_NK.shape[1])
    if blocks.numel() and not _encode(name, bits(w_NK), weights, blocks.numpy()):
        refuse(name, w_NK)
    return blocks


def decode(name: str, data_NB: Tensor, columns: int) -> Tensor:
    """Return the values of blocks, float32 [N, K].

    data_NB  [N, B] uint8; of a plain type also [N, K] of that type

    Raises QuantError for a type nobody decodes, or if B is not that of K columns.
    """
    import torch

    data = data_NB.contiguous().view(torch.uint8)
    if data.shape[1] != row_bytes(name, columns):
        raise QuantError(
            f"a row has {data.shape[1]} bytes,\n"
            f"  expected {row_bytes(name, columns)}: {columns} columns of {name}"
        )
    if name in CASTS:
        return data.view(getattr(torch, CASTS[name])).float()
    out = torch.empty(data.shape[0], columns)
    if name in LOOPS:
        rows, size = block(name)
        loop = getattr(import_module(LOOPS[name]), f"decode_{name.lower()}")
        loop(data.numpy().reshape(-1, size), out.numpy().reshape(-1, rows))
    elif name in SUPER_BLOCKS:
        _super_blocks(name).decode_rows(name, data.numpy(), out.numpy())
    else:
        out.copy_(torch.from_numpy(_decode_by_gguf(name, data.numpy())))
    return out


def outside(
    name: str, w_NK: Tensor, decoded_NK: Tensor, *, importance: Tensor | None = None
) -> int:
    """Return how many decoded weights are farther off than the type allows: `bounds`.

    importance  the importance the weight was encoded with: other errors are allowed then

    Raises QuantError for a type that has no bound.
    """
    from quant.ggml import bounds

    if name not in BOUNDED:
        raise QuantError(f"{name} has no bound,\n  expected one of {' '.join(BOUNDED)}")
    assert w_NK.shape == decoded_NK.shape, f"{list(w_NK.shape)} became {list(decoded_NK.shape)}"
    row_bytes(name, w_NK.shape[1])
    weights = None if importance is None else weights_of(name, importance, w_NK.shape[1])
    decoded = decoded_NK.detach().float().contiguous().numpy()
    return bounds.outside(name, bits(w_NK), decoded, weights) if decoded.size else 0


def refuse(name: str, w_NK: Tensor) -> NoReturn:
    """Raise the QuantError of a weight that could not be stored."""
    from quant.fp8.reference import check_finite

    check_finite(w_NK)
    raise QuantError(
        f"the largest weight is {float(w_NK.abs().max()):g},\n"
        f"  expected less: {name} would store an infinity"
    )


def weights_of(name: str, importance: Tensor, columns: int) -> NDArray[Any] | None:
    """Return an importance as float32 [K], None for a type that uses none.

    Raises QuantError if it is of another length, negative or not finite.
    """
    if tuple(importance.shape) != (columns,):
        got = list(importance.shape)
        raise QuantError(f"the importance has shape {got},\n  expected [{columns}]")
    if not bool((importance.isfinite() & (importance >= 0)).all()):
        raise QuantError("an importance is negative, infinite or NaN,\n  expected mean squares")
    if name in UNWEIGHTED:
        return None
    weights: NDArray[Any] = importance.float().contiguous().numpy()
    return weights


def _encode(name: str, w: NDArray[Any], importance: NDArray[Any] | None, out: NDArray[Any]) -> bool:
    """Fill in the blocks; return False if a weight is not finite or cannot be stored."""
    import numpy as np

    from quant.ggml import cast as casts

    if name in CASTS:
        cast = getattr(casts, f"cast_{name.lower()}")
        return bool(cast(w, out.view(np.uint32 if name == "F32" else np.uint16)))
    if name in SUPER_BLOCKS:
        below = casts.all_below(w, np.float32(LARGEST))
        return bool(below) and _encode_super_blocks(name, w, importance, out)
    blocks, rows = out.reshape(-1, block(name)[1]), w.reshape(-1, LANES.get(name, 32))
    if importance is not None and name in SEARCHED:
        return _search(name, w, importance.reshape(-1, 32), out)
    loop = getattr(import_module(LOOPS[name]), f"encode_{name.lower()}")
    if name in {"IQ4_NL", "IQ4_XS"}:
        table = np.empty((0, 32), np.float32) if importance is None else importance.reshape(-1, 32)
        return bool(loop(rows, table, blocks))
    return bool(loop(rows, blocks))


def _search(name: str, w: NDArray[Any], importance: NDArray[Any], out: NDArray[Any]) -> bool:
    """Fill in the blocks of a type whose scales are searched for; return False as `_encode`."""
    import numpy as np

    from quant.ggml import weighted

    loop = weighted.encode_symmetric if name.endswith("_0") else weighted.encode_line
    for at in range(0, len(w), SEARCHED_ROWS):
        rows = w[at : at + SEARCHED_ROWS]
        wide = rows if rows.dtype == np.uint32 else rows.astype(np.uint32) << np.uint32(16)
        blocks = out[at : at + SEARCHED_ROWS].reshape(-1, block(name)[1])
        if not loop(wide.reshape(-1, 32), importance, np.int32(SEARCHED[name]), blocks):
            return False
    return True


def _encode_super_blocks(
    name: str, w: NDArray[Any], importance: NDArray[Any] | None, out: NDArray[Any]
) -> bool:
    """Fill in super-blocks; return False if a scale is infinite."""
    import numpy as np

    _super_blocks(name).encode_rows(
        name, w if w.dtype == np.uint16 else w.view(np.float32), importance, out
    )
    blocks = out.reshape(-1, block(name)[1])
    halves = (blocks[:, at : at + 2].copy().view(np.float16) for at in SUPER_BLOCKS[name])
    return all(np.isfinite(half).all() for half in halves)


def _super_blocks(name: str) -> ModuleType:
    """Return the loops of the K-quants or the I-quants."""
    return import_module(f"quant.ggml.{'i' if name in I_QUANTS else 'k'}_quants")


def _decode_by_gguf(name: str, data: NDArray[Any]) -> NDArray[Any]:
    """Return what the gguf package decodes, float32 [N, K]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: NDArray[Any] = dequantize(data, GGMLQuantizationType[name])
    except NotImplementedError as error:
        raise QuantError(f"{name} cannot be read,\n  expected {writable()}") from error
    return values


def bits(w_NK: Tensor) -> NDArray[Any]:
    """Return the bits as unsigned integers, float32's for float16."""
    import torch

    halves = w_NK.dtype == torch.bfloat16
    x = w_NK.detach() if halves else w_NK.detach().float()
    words: NDArray[Any] = x.contiguous().view(torch.uint16 if halves else torch.uint32).numpy()
    return words
