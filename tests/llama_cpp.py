"""Drive a real llama.cpp: the outside truth for the GGUF files that we write.

    with LlamaCpp(path, n_ctx=256) as model:
        logits_TV = model.logits(model.tokenize("In the beginning"))

The library is the one inside PyPI's `xllamacpp`, whose extension module exports llama.h. Of that
header only what is called here is declared. Both parameter structs go by value and grow with each
release, so their tails are opaque and longer than any version's: by the C calling conventions of
x86-64 and AArch64 a struct of this size travels in memory, where bytes past its end are never read.
The fields before the tail are those of build 11549, and their defaults are checked at start.

It needs libgomp.so.1, which torch brings: torch is to be imported first, as conftest does.

The attention cache is F32 and flash attention is off. The defaults (an F16 cache, a flash attention
that rounds to F16) put the logits of an F32 file 5e-3 off; like this they are 3e-5 off.

T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import ctypes as c
import functools
import importlib.util
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
OFF, _F32, _F16 = 0, 0, 1
_TRUNK, _MTP = 0, 1
_DECODE = 1


class _ModelParams(c.Structure):
    _fields_ = [
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
        ("tail", c.c_uint64 * 32),
    ]


class _ContextParams(c.Structure):
    _fields_ = [
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("kinds", c.c_int32 * 3),
        ("flash_attn_type", c.c_int32),
        ("rope", c.c_float * 6),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p * 2),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("tail", c.c_uint64 * 32),
    ]


class _Batch(c.Structure):
    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("logits", c.POINTER(c.c_int8)),
    ]


class _Embd(c.Structure):
    _fields_ = [("data", c.POINTER(c.c_float)), ("n_rows", c.c_size_t), ("n_embd", c.c_size_t)]


LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_said: deque[str] = deque(maxlen=4)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LOG, c.c_void_p)),
    "llama_model_default_params": (_ModelParams, ()),
    "llama_context_default_params": (_ContextParams, ()),
    "llama_model_load_from_file": (c.c_void_p, (c.c_char_p, _ModelParams)),
    "llama_model_free": (None, (c.c_void_p,)),
    "llama_model_get_vocab": (c.c_void_p, (c.c_void_p,)),
    "llama_vocab_n_tokens": (c.c_int32, (c.c_void_p,)),
    "llama_init_from_model": (c.c_void_p, (c.c_void_p, _ContextParams)),
    "llama_free": (None, (c.c_void_p,)),
    "llama_get_memory": (c.c_void_p, (c.c_void_p,)),
    "llama_memory_clear": (None, (c.c_void_p, c.c_bool)),
    "llama_decode": (c.c_int32, (c.c_void_p, _Batch)),
    "llama_get_logits": (c.POINTER(c.c_float), (c.c_void_p,)),
    "llama_set_embeddings": (None, (c.c_void_p, c.c_bool)),
    "llama_get_embeddings": (c.POINTER(c.c_float), (c.c_void_p,)),
    "llama_get_embeddings_seq": (c.POINTER(c.c_float), (c.c_void_p, c.c_int32)),
    "llama_pooling_type": (c.c_int, (c.c_void_p,)),
    "llama_model_n_embd_out": (c.c_int32, (c.c_void_p,)),
    "llama_batch_ext_init": (c.c_void_p, (c.c_void_p,)),
    "llama_batch_ext_free": (None, (c.c_void_p,)),
    "llama_batch_ext_add_token": (c.c_int32, (c.c_void_p, c.c_int32, c.c_int32)),
    "llama_batch_ext_set_embd_state": (c.c_bool, (c.c_void_p, c.c_int32, _Embd)),
    "llama_batch_ext_set_pos": (c.c_bool, (c.c_void_p, c.c_int32, c.POINTER(c.c_int32))),
    "llama_batch_ext_set_output_logits": (c.c_bool, (c.c_void_p, c.c_int32, c.c_bool)),
    "llama_process": (c.c_int32, (c.c_void_p, c.c_int, c.c_void_p)),
    "llama_tokenize": (
        c.c_int32,
        (c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool),
    ),
}


def _hear(level: int, text: bytes, _: int | None) -> None:
    """Keep what is said last; a failed load tells its reason only here."""
    _said.append(text.decode(errors="replace"))


LISTEN = LOG(_hear)


def reason() -> str:
    """Return what was said last."""
    return "".join(_said).strip()


@functools.cache
def library() -> Any:
    """Return the library, its functions declared and its parameter structs checked.

    Raises ModuleNotFoundError if `xllamacpp` is absent: it belongs to the test extra.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("xllamacpp is not installed: pip install '.[test]'")
    lib = c.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so")))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_log_set(LISTEN, None)
    lib.llama_backend_init()
    _check_layout(lib.llama_model_default_params(), lib.llama_context_default_params())
    return lib


def _check_layout(model: _ModelParams, context: _ContextParams) -> None:
    seen = [
        (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max),
        list(context.kinds),
        context.flash_attn_type,
        list(context.rope),
        context.defrag_thold,
        (context.type_k, context.type_v),
        (model.n_gpu_layers, model.use_extra_bufts, model.no_alloc, model.load_mtp),
    ]
    defaults = [
        (512, 2048, 512, 1),
        [-1, -1, -1],
        -1,
        [0, 0, -1, -1, -1, -1],
        -1,
        (_F16, _F16),
        (-1, True, False, False),
    ]
    assert seen == defaults, f"llama.h has changed its parameters: {seen}, expected {defaults}"


def cache_sizes(path: Path, n_ctx: int, n_seq_max: int) -> list[float]:
    """Return the MiB that a context's caches take, as llama.cpp logs them: tokens, then states."""
    lib, said = library(), []
    hear = LOG(lambda _level, text, _data: said.append(text.decode(errors="replace")))
    model = lib.llama_model_load_from_file(bytes(path), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = n_ctx, n_seq_max
    params.n_threads = params.n_threads_batch = 1
    lib.llama_log_set(hear, None)
    try:
        lib.llama_free(lib.llama_init_from_model(model, params))
    finally:
        lib.llama_log_set(LISTEN, None)
        lib.llama_model_free(model)
    return [
        float(mib) for mib in re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", "".join(said))
    ]


class LlamaCpp:
    """A GGUF file loaded by llama.cpp; with `mtp` its MTP block too, which only `drafts` runs.

    Raises ValueError, with what llama.cpp said, if it refuses the file.
    """

    def __init__(self, path: Path, n_ctx: int, *, mtp: bool = False) -> None:
        self.lib, self.n_ctx = library(), n_ctx
        _said.clear()
        params = self.lib.llama_model_default_params()
        params.load_mtp = mtp
        self.model = self.lib.llama_model_load_from_file(bytes(path), params)
        if not self.model:
            raise ValueError(f"{path.name}: {reason()}")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.num_tokens = int(self.lib.llama_vocab_n_tokens(self.vocab))
        self.trunk = self._context(_TRUNK)
        self.head = self._context(_MTP) if mtp else None

    def _context(self, kind: int) -> int:
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_ctx
        params.n_outputs_max_per_seq, params.ctx_type = 0, kind
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type, params.type_k, params.type_v = OFF, _F32, _F32
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            self.lib.llama_model_free(self.model)
            raise ValueError(reason())
        return int(context)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for context in filter(None, (self.trunk, self.head)):
            self.lib.llama_free(context)
        self.lib.llama_model_free(self.model)

    def logits(self, tokens: Sequence[int]) -> Rows:
        """Return [T, V]: what follows each token, the state starting empty."""
        self._forget(self.trunk)
        return self._decode(tokens)

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return the n most probable next tokens, one after the other."""
        self._forget(self.trunk)
        made: list[int] = []
        step = tokens
        for _ in range(n):
            made.append(int(self._decode(step)[-1].argmax()))
            step = made[-1:]
        return made

    def drafts(self, tokens: Sequence[int]) -> Rows:
        """Return [T-1, V]: what the MTP block expects two after each token but the last.

        It reads the trunk's state after that token and the token that follows.
        """
        assert self.head, "loaded without mtp"
        self.lib.llama_set_embeddings(self.trunk, 1)
        self.logits(tokens)
        found = self.lib.llama_get_embeddings(self.trunk)
        width = self.lib.llama_model_n_embd_out(self.model)
        state_TH = np.ctypeslib.as_array(found, (len(tokens), width)).copy()
        self.lib.llama_set_embeddings(self.trunk, 0)
        self._forget(self.head)
        batch = self.lib.llama_batch_ext_init(self.head)
        for at, (token, state_H) in enumerate(zip(tokens[1:], state_TH, strict=False)):
            self._add(batch, at, token, state_H)
        failed = self.lib.llama_process(self.head, _DECODE, batch)
        self.lib.llama_batch_ext_free(batch)
        assert not failed, f"llama_process returned {failed}: {reason()}"
        return self._rows(self.head, len(tokens) - 1)

    @property
    def pooling(self) -> int:
        """What the file says of the hidden states: 0 none, 1 mean, 2 first, 3 last."""
        return int(self.lib.llama_pooling_type(self.trunk))

    def embedding(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return [H]: the hidden states of a text after the final norm, pooled as the file says."""
        self.lib.llama_set_embeddings(self.trunk, 1)
        self._forget(self.trunk)
        self._compute(tokens)
        found = self.lib.llama_get_embeddings_seq(self.trunk, 0)
        assert found, "nothing was pooled"
        pooled = np.ctypeslib.as_array(found, (self.lib.llama_model_n_embd_out(self.model),)).copy()
        self.lib.llama_set_embeddings(self.trunk, 0)
        return pooled

    def _add(self, batch: int, at: int, token: int, state_H: NDArray[np.float32]) -> None:
        pointer = state_H.ctypes.data_as(c.POINTER(c.c_float))
        index = self.lib.llama_batch_ext_add_token(batch, 0, token)
        assert index == at, f"token {token} at {at}: {index}"
        good = (
            self.lib.llama_batch_ext_set_embd_state(batch, at, _Embd(pointer, 1, len(state_H))),
            self.lib.llama_batch_ext_set_pos(batch, at, c.byref(c.c_int32(at))),
            self.lib.llama_batch_ext_set_output_logits(batch, at, 1),
        )
        assert all(good), f"token {token} at {at}: {good}"

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids; special tokens in the text are read as such, none are added."""
        raw = text.encode()
        ids = (c.c_int32 * (len(raw) + 1))()
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), 0, 1)
        assert count >= 0, "a token is at least one byte"
        return list(ids[:count])

    def _forget(self, context: int) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), 1)

    def _decode(self, tokens: Sequence[int]) -> Rows:
        self._compute(tokens)
        return self._rows(self.trunk, len(tokens))

    def _compute(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        assert 0 < count <= self.n_ctx, f"{count} tokens, room for {self.n_ctx}"
        ids, wanted = (c.c_int32 * count)(*tokens), (c.c_int8 * count)(*[1] * count)
        batch = _Batch(n_tokens=count, token=ids, logits=wanted)
        failed = self.lib.llama_decode(self.trunk, batch)
        assert not failed, f"llama_decode returned {failed}: {reason()}"

    def _rows(self, context: int, count: int) -> Rows:
        found = self.lib.llama_get_logits(context)
        return np.ctypeslib.as_array(found, (count, self.num_tokens)).copy()
