"""What is planted into the tensors of a vision tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.planted.edit import Entry
from tests.planted.fault import Names

Entries = dict[str, Entry]


def swap(one: str, two: str) -> Callable[[Entries], Names]:
    """Return a change that swaps the bytes of two tensors of one size."""

    def change(entries: Entries) -> Names:
        entries[one].data, entries[two].data = entries[two].data, entries[one].data
        return one, two

    return change


def values(name: str, how: Callable[[torch.Tensor], Any]) -> Callable[[Entries], Names]:
    """Return a change of a plain tensor's values in place."""

    def change(entries: Entries) -> Names:
        view = entries[name].view()
        view.copy_(how(view.clone()))
        return name

    return change


def bit(name: str, index: int = 0) -> Callable[[Entries], Names]:
    """Return a change of one bit."""

    def change(entries: Entries) -> Names:
        entries[name].data[index] ^= 1
        return name

    return change


def zeroed(name: str) -> Callable[[Entries], Names]:
    """Return a change that loses the first half of a tensor's bytes."""

    def change(entries: Entries) -> Names:
        entries[name].data[: len(entries[name].data) // 2] = 0
        return name

    return change


def copied(one: str, two: str, turn: int = 0) -> Callable[[Entries], Names]:
    """Return a change that puts a tensor's bytes, moved by some rows, in the place of another."""

    def change(entries: Entries) -> Names:
        entries[two].data = np.roll(entries[one].blocks(), turn, 0).reshape(-1).copy()
        return two

    return change


def scale(name: str, value: bytes | None) -> Callable[[Entries], Names]:
    """Return a change of the first scale of a tensor, or of its first weight: NaN, or larger."""

    def change(entries: Entries) -> Names:
        data = entries[name].data
        data[1 if value is None else slice(0, 2)] = 0x7F if value is None else list(value)
        return name

    return change


TENSORS_OF_FILES: dict[str, Callable[[Entries], Names]] = {
    "frames-swapped": swap("v.patch_embd.weight", "v.patch_embd.weight.1"),
    "norm-and-bias-swapped": swap("v.post_ln.weight", "v.post_ln.bias"),
    "a-bit-of-a-norm": bit("v.blk.0.ln2.weight"),
    "a-bit-of-a-bias": bit("v.blk.0.attn_qkv.bias"),
    "a-bit-of-a-patch": bit("v.patch_embd.weight", 400),
    "positions-rolled": values("v.position_embd.weight", lambda v: v.roll(1, 0)),
    "patch-turned": values("v.patch_embd.weight", lambda v: v.transpose(-1, -2)),
    "channels-turned": values("v.patch_embd.weight", lambda v: v.flip(1)),
    "norm-plus-one": values("v.blk.0.ln1.weight", lambda v: v + 1),
    "nan": values("v.blk.0.attn_out.bias", lambda v: v * float("nan")),
    "infinity": values("v.position_embd.weight", lambda v: v / 0),
    "one-frame-twice": copied("v.patch_embd.weight", "v.patch_embd.weight.1"),
    "weight-of-another": copied("v.blk.0.attn_out.weight", "v.blk.0.attn_out.weight", turn=1),
    "scale-nan": scale("v.blk.0.attn_qkv.weight", b"\xff\x7f"),
    "scale-larger": scale("v.blk.0.ffn_up.weight", None),
    "weight-half-zero": zeroed("v.blk.0.attn_qkv.weight"),
    "merger-half-zero": zeroed("mm.2.weight"),
}
# The bundled model has a vision tower whose norms are ones and whose biases are zeros.
OF_TRAINED: dict[str, Callable[[Entries], Names]] = {
    "norms-swapped": swap("v.blk.0.ln1.weight", "v.blk.0.ln2.weight"),
    "bias-zeroed": values("v.blk.0.ffn_up.bias", torch.zeros_like),
    "query-and-value-swapped": values(
        "v.blk.0.attn_qkv.bias", lambda v: torch.cat(v.chunk(3)[::-1])
    ),
}


def _lose(entries: Entries) -> str:
    del entries["v.blk.0.ffn_down.bias"]
    return "v.blk.0.ffn_down.bias"


def _more(entries: Entries) -> str:
    entries["v.blk.9.ln1.bias"] = entries["v.blk.0.ln1.bias"].renamed("v.blk.9.ln1.bias")
    return "v.blk.9.ln1.bias"


def _lose_frame(entries: Entries) -> str:
    del entries["v.patch_embd.weight.1"]
    return "v.patch_embd.weight.1"


def _shape(entries: Entries) -> str:
    one = entries["v.position_embd.weight"]
    one.info = replace(one.info, shape=one.info.shape[::-1])
    if one.info.shape[0] == one.info.shape[1]:
        one.info = replace(one.info, shape=(1, one.info.numel))
    return one.info.name


def cast(name: str, dtype: torch.dtype) -> Callable[[Entries], Names]:
    """Return a change of a tensor's type: llama.cpp aborts where it adds it to what is F32."""

    def change(entries: Entries) -> Names:
        entries[name].put(entries[name].view().to(dtype))
        return name

    return change


def _lose_block(entries: Entries) -> str:
    lost = [name for name in entries if name.startswith("v.blk.0.")]
    for name in lost:
        del entries[name]
    return lost[0]


HEADERS: dict[str, Callable[[Entries], Names]] = {
    "lost": _lose,
    "more": _more,
    "shape": _shape,
    "block-lost": _lose_block,
    "bias-in-f16": cast("v.blk.0.attn_qkv.bias", torch.float16),
    "norm-in-bf16": cast("v.blk.0.ln1.weight", torch.bfloat16),
    "positions-in-f16": cast("v.position_embd.weight", torch.float16),
    "second-frame-lost": _lose_frame,
}
BLOCK = "model.visual.blocks.0."
TENSORS_OF_FOLDERS: dict[str, Callable[[Entries], Names]] = {
    "norms-swapped": swap(BLOCK + "norm1.weight", BLOCK + "norm2.weight"),
    "a-bit": bit(BLOCK + "attn.qkv.weight", 64),
    "positions-rolled": values("model.visual.pos_embed.weight", lambda v: v.roll(1, 0)),
    "frames-swapped": values("model.visual.patch_embed.proj.weight", lambda v: v.flip(2)),
    "bias-zeroed": values(BLOCK + "attn.proj.bias", torch.zeros_like),
    "merger-half-zero": zeroed("model.visual.merger.linear_fc1.weight"),
}
