"""Drive llama.cpp's vision encoder: what it makes of an image with the mmproj file that we write.

    with LlamaCpp(text_file, 64) as model:
        embeddings_TH = encode_image(model, mmproj_file, pixels_YXC)

mtmd.h is exported by the same library as llama.h, and its parameters are treated alike: by value,
a tail longer than any version's, the defaults checked.

Y, X rows and columns of pixels, C = 3 channels; T tokens, H hidden size of the text model.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.llama_cpp import LISTEN, LOG, OFF, LlamaCpp, reason

_IMAGE = 1
_MARKER = b"<__media__>"


class _Params(c.Structure):
    _fields_ = [
        ("use_gpu", c.c_bool),
        ("device", c.c_void_p),
        ("print_timings", c.c_bool),
        ("n_threads", c.c_int),
        ("image_marker", c.c_char_p),
        ("media_marker", c.c_char_p),
        ("flash_attn_type", c.c_int),
        ("warmup", c.c_bool),
        ("image_min_tokens", c.c_int),
        ("image_max_tokens", c.c_int),
        ("tail", c.c_uint64 * 32),
    ]


class _Text(c.Structure):
    _fields_ = [
        ("text", c.c_char_p),
        ("text_len", c.c_size_t),
        ("add_special", c.c_bool),
        ("parse_special", c.c_bool),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mtmd_log_set": (None, (LOG, c.c_void_p)),
    "mtmd_context_params_default": (_Params, ()),
    "mtmd_init_from_file": (c.c_void_p, (c.c_char_p, c.c_void_p, _Params)),
    "mtmd_free": (None, (c.c_void_p,)),
    "mtmd_bitmap_init": (c.c_void_p, (c.c_uint32, c.c_uint32, c.c_char_p)),
    "mtmd_bitmap_free": (None, (c.c_void_p,)),
    "mtmd_input_chunks_init": (c.c_void_p, ()),
    "mtmd_input_chunks_size": (c.c_size_t, (c.c_void_p,)),
    "mtmd_input_chunks_get": (c.c_void_p, (c.c_void_p, c.c_size_t)),
    "mtmd_input_chunks_free": (None, (c.c_void_p,)),
    "mtmd_input_chunk_get_type": (c.c_int, (c.c_void_p,)),
    "mtmd_input_chunk_get_n_tokens": (c.c_size_t, (c.c_void_p,)),
    "mtmd_tokenize": (
        c.c_int32,
        (c.c_void_p, c.c_void_p, c.POINTER(_Text), c.POINTER(c.c_void_p), c.c_size_t),
    ),
    "mtmd_encode_chunk": (c.c_int32, (c.c_void_p, c.c_void_p)),
    "mtmd_get_output_embd": (c.POINTER(c.c_float), (c.c_void_p,)),
}


def encode_image(
    model: LlamaCpp, mmproj: Path, pixels_YXC: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return [T, H]: the embeddings that stand for the image; no resizing if its sides fit.

    Raises ValueError, with what llama.cpp said, if it refuses the file.
    """
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(model.lib, name)
        function.restype, function.argtypes = result, arguments
    model.lib.mtmd_log_set(LISTEN, None)
    context = model.lib.mtmd_init_from_file(bytes(mmproj), model.model, _params(model.lib))
    if not context:
        raise ValueError(f"{mmproj.name}: {reason()}")
    chunks = model.lib.mtmd_input_chunks_init()
    try:
        return _encode(model, context, chunks, pixels_YXC)
    finally:
        model.lib.mtmd_input_chunks_free(chunks)
        model.lib.mtmd_free(context)


def _params(lib: Any) -> _Params:
    params: _Params = lib.mtmd_context_params_default()
    seen = (
        params.n_threads,
        params.media_marker,
        params.flash_attn_type,
        params.warmup,
        params.image_min_tokens,
        params.image_max_tokens,
    )
    assert seen == (4, _MARKER, -1, True, -1, -1), f"mtmd.h has changed its parameters: {seen}"
    params.use_gpu, params.warmup = False, False
    params.n_threads, params.flash_attn_type = 1, OFF
    return params


def _encode(
    model: LlamaCpp, context: int, chunks: int, pixels_YXC: NDArray[np.uint8]
) -> NDArray[np.float32]:
    lib, (rows, columns, _) = model.lib, pixels_YXC.shape
    image = lib.mtmd_bitmap_init(columns, rows, pixels_YXC.tobytes())
    text = _Text(text=_MARKER, text_len=len(_MARKER), parse_special=True)
    failed = lib.mtmd_tokenize(context, chunks, text, (c.c_void_p * 1)(image), 1)
    lib.mtmd_bitmap_free(image)
    assert not failed, f"mtmd_tokenize returned {failed}: {reason()}"
    found = [
        lib.mtmd_input_chunks_get(chunks, i) for i in range(lib.mtmd_input_chunks_size(chunks))
    ]
    chunk = next(one for one in found if lib.mtmd_input_chunk_get_type(one) == _IMAGE)
    failed = lib.mtmd_encode_chunk(context, chunk)
    assert not failed, f"mtmd_encode_chunk returned {failed}: {reason()}"
    count = lib.mtmd_input_chunk_get_n_tokens(chunk)
    width = lib.llama_model_n_embd_out(model.model)
    return np.ctypeslib.as_array(lib.mtmd_get_output_embd(context), (count, width)).copy()
