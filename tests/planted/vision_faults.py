"""Faults of the vision tower: in an mmproj file, and in a folder of the hub's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from formats.gguf.header import Kv
from tests.planted.artifact import Artifact
from tests.planted.edit import Entry, read_file
from tests.planted.fault import (
    AS_IT_IS,
    BOTH,
    FORGED,
    NAMED,
    STRUCTURE,
    TENSORS,
    UNOPENED,
    Fault,
    Names,
    in_bases,
)

FILE = "mmproj-model.gguf"
BESIDE = in_bases("nano-mmproj", "wide-mmproj-bf16")
HUB = in_bases("moe-fp8-block-hub")
Entries = dict[str, Entry]


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (key, value) in KEYS.items():
        yield _fault(f"key-{name}", partial(_set, key=key, value=value), STRUCTURE)
    for key in REQUIRED:
        yield _fault(f"key-missing-{key}", partial(_unset, key=key), STRUCTURE, UNOPENED)
    for name, pair in ADDED.items():
        yield _fault(f"key-added-{name}", partial(_add, pair=pair), STRUCTURE)
    for name, change in TENSORS_OF_FILES.items():
        yield _fault(f"tensor-{name}", partial(_change, change=change), TENSORS)
    for name, change in OF_TRAINED.items():
        plant = partial(_change, change=change)
        yield _fault(f"tensor-{name}", plant, TENSORS, where=in_bases("wide-mmproj-bf16"))
    for name, change in HEADERS.items():
        yield _fault(f"tensor-{name}", partial(_change, change=change), STRUCTURE, UNOPENED)
    yield _fault("cut", _cut, STRUCTURE, UNOPENED)
    yield _fault("of-another-model", _of_another, TENSORS, where=in_bases("wide-mmproj-bf16"))
    yield _fault("a-text-model", _text_model, STRUCTURE, UNOPENED)
    yield _fault("missing", _remove, STRUCTURE, receipts=(AS_IT_IS, FORGED))
    for name, change in TENSORS_OF_FOLDERS.items():
        yield _fault(f"folder-{name}", partial(_change_folder, change=change), TENSORS, where=HUB)


def _fault(
    name: str,
    plant: Callable[[Artifact], Names],
    level: str,
    codes: tuple[int, ...] = NAMED,
    where=BESIDE,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    return Fault("vision", name, plant, where, level, codes, receipts)


def _set(artifact: Artifact, key: str, value: Any) -> str:
    file = read_file(artifact.file(FILE))
    at = next(i for i, pair in enumerate(file.pairs) if pair.key == key)
    old = file.pairs[at]
    file.pairs[at] = replace(old, value=value(old.value) if callable(value) else value)
    assert file.pairs[at] != old, f"{key} is {value} already"
    artifact.write(FILE, file.content())
    return key


def _unset(artifact: Artifact, key: str) -> str:
    file = read_file(artifact.file(FILE))
    file.pairs = [pair for pair in file.pairs if pair.key != key]
    artifact.write(FILE, file.content())
    return key


def _add(artifact: Artifact, pair: Kv) -> str:
    file = read_file(artifact.file(FILE))
    file.pairs.append(pair)
    artifact.write(FILE, file.content())
    return pair.key


def _change(artifact: Artifact, change: Callable[[Entries], Names]) -> Names:
    file = read_file(artifact.file(FILE))
    names = change(file.entries)
    artifact.write(FILE, file.content())
    return names


def _change_folder(artifact: Artifact, change: Callable[[Entries], Names]) -> Names:
    file = read_file(artifact.tensor_files()[0])
    names = change(file.entries)
    artifact.write(file.path.name, file.content())
    return names


def _cut(artifact: Artifact) -> str:
    artifact.write(FILE, artifact.file(FILE).read_bytes()[:-500])
    return FILE


def _text_model(artifact: Artifact) -> str:
    artifact.write(FILE, artifact.file("model.gguf").read_bytes())
    return f"{FILE}|general.architecture|v.blk.0"


def _of_another(artifact: Artifact) -> str:
    other = artifact.workshop.open(artifact.base, seed=36)
    artifact.write(FILE, other.file(FILE).read_bytes())
    return "v.blk.0.attn_qkv.weight"


def _remove(artifact: Artifact) -> str:
    artifact.file(FILE).unlink()
    return FILE


KEYS: dict[str, tuple[str, Any]] = {
    "image-mean": ("clip.vision.image_mean", [0.48, 0.46, 0.41]),
    "image-std": ("clip.vision.image_std", [0.27, 0.26, 0.28]),
    "patch-size": ("clip.vision.patch_size", lambda n: n - 2),
    "image-size": ("clip.vision.image_size", lambda n: 2 * n),
    "heads": ("clip.vision.attention.head_count", lambda n: n // 2),
    "eps": ("clip.vision.attention.layer_norm_epsilon", 1e-3),
    "merge": ("clip.vision.spatial_merge_size", 1),
    "blocks": ("clip.vision.block_count", 2),
    "width": ("clip.vision.embedding_length", lambda n: 2 * n),
    "hidden": ("clip.vision.feed_forward_length", lambda n: n - 1),
    "projection": ("clip.vision.projection_dim", lambda n: 2 * n),
    "projector": ("clip.projector_type", "qwen2vl_merger"),
    "gelu": ("clip.use_gelu", False),
    "encoder": ("clip.has_vision_encoder", False),
    "deepstack": ("clip.vision.is_deepstack_layers", [True]),
    "architecture": ("general.architecture", "qwen35"),
    "file-type": ("general.file_type", 2),
}
REQUIRED = (
    "clip.vision.image_mean",
    "clip.vision.spatial_merge_size",
    "clip.projector_type",
    "clip.vision.attention.head_count",
    "clip.use_gelu",
)
ADDED = {
    "silu": Kv("clip.use_silu", "bool", True),
    "audio": Kv("clip.has_audio_encoder", "bool", True),
    "window": Kv("clip.vision.n_wa_pattern", "uint32", 8),
    "crop": Kv("clip.vision.image_crop_resolution", "uint32", 64),
    "max-pixels": Kv("clip.vision.image_max_pixels", "uint32", 4096),
}


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


def _shape(entries: Entries) -> str:
    one = entries["v.position_embd.weight"]
    one.info = replace(one.info, shape=one.info.shape[::-1])
    if one.info.shape[0] == one.info.shape[1]:
        one.info = replace(one.info, shape=(1, one.info.numel))
    return one.info.name


HEADERS: dict[str, Callable[[Entries], Names]] = {"lost": _lose, "more": _more, "shape": _shape}
BLOCK = "model.visual.blocks.0."
TENSORS_OF_FOLDERS: dict[str, Callable[[Entries], Names]] = {
    "norms-swapped": swap(BLOCK + "norm1.weight", BLOCK + "norm2.weight"),
    "a-bit": bit(BLOCK + "attn.qkv.weight", 64),
    "positions-rolled": values("model.visual.pos_embed.weight", lambda v: v.roll(1, 0)),
    "frames-swapped": values("model.visual.patch_embed.proj.weight", lambda v: v.flip(2)),
    "bias-zeroed": values(BLOCK + "attn.proj.bias", torch.zeros_like),
    "merger-half-zero": zeroed("model.visual.merger.linear_fc1.weight"),
}
