"""Faults that headers show: tensors missing, more, of another type or shape, or there twice."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from formats.tensor import TensorInfo
from tests.planted.artifact import Artifact
from tests.planted.edit import Entry, Tensors
from tests.planted.fault import (
    FORGED,
    STRUCTURE,
    TENSORS,
    UNOPENED,
    Fault,
    Names,
    Where,
    in_bases,
)
from tests.planted.tensor_fault import Plant, tensor_fault

HOMES = in_bases(
    "nano-fp8-block",
    "nano-fp8-block-hub",
    "wide-fp8-channel",
    "moe-bf16-split",
    "wide-mixed",
    "wide-bf16",
    "nano-q8_0",
    "wide-q4_k_m",
    "moe-mxfp4_moe",
)
FOLDERS = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-bf16-split", "wide-mixed"
)
FP8 = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-fp8-block", "wide-mixed"
)
FILES = in_bases("wide-bf16", "nano-q8_0", "wide-q4_k_m", "moe-mxfp4_moe")
UP = "{mlp}up_proj.weight"
UNTIED = in_bases("wide-fp8-channel", "wide-bf16-split", "wide-mixed")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name in MISSING:
        yield fault(f"missing-{name}", partial(remove, hub=name), HOMES)
    yield fault("missing-head", partial(remove, hub="lm_head.weight"), UNTIED)
    yield fault("missing-mtp", _without_mtp, FILES)
    # transformers saves a model so; engines that draft refuse it by themselves
    yield fault("missing-mtp", _without_mtp, FOLDERS, receipts=(FORGED,))
    yield fault("missing-layer", _without_layer, HOMES)
    for name, (wanted, entry) in EXTRA.items():
        yield fault(f"extra-{name}", partial(_add, wanted=wanted, entry=entry), FOLDERS)
    for name, (wanted, entry) in EXTRA_OF_FILES.items():
        yield fault(f"extra-{name}", partial(_add, wanted=wanted, entry=entry), FILES)
    yield fault("order-of-tensors", _reorder, HOMES, receipts=(FORGED,))
    yield fault("two-names-exchanged", _rename, HOMES, TENSORS)
    yield Fault("header", "a-name-twice", _twice, FOLDERS, STRUCTURE, UNOPENED)
    yield Fault(
        "header", "metadata-null", _without_metadata, FOLDERS, STRUCTURE, receipts=(FORGED,)
    )
    yield Fault("header", "cut", partial(_cut, keep=0.7), HOMES, STRUCTURE, UNOPENED)
    yield Fault("header", "cut-by-a-byte", partial(_cut, keep=-1), FOLDERS, STRUCTURE, UNOPENED)
    yield Fault("header", "a-hole-at-the-end", _lengthen, HOMES, STRUCTURE, UNOPENED)
    yield Fault("header", "empty-file", partial(_cut, keep=0.0), HOMES, STRUCTURE, UNOPENED)


def fault(name: str, plant: Plant, where: Where, level: str = STRUCTURE, **more: Any) -> Fault:
    """Return a fault that headers show; the file may be refused for it."""
    return tensor_fault("header", name, plant, where, level=level, codes=UNOPENED, **more)


MISSING = (
    "mtp.norm.weight",
    "layers.0.linear_attn.A_log",
    "layers.0.linear_attn.dt_bias",
    "layers.1.post_attention_layernorm.weight",
    "norm.weight",
    "layers.0.linear_attn.in_proj_z.weight",
)


def remove(tensors: Tensors, hub: str) -> str:
    """Lose a weight, and its scale with it."""
    stored, scale = tensors.stored(hub), tensors.scale(hub)
    for name in (stored, *([scale.info.name] if scale else ())):
        del tensors.home(name).entries[name]
    return stored


def _remove_all(tensors: Tensors, prefixes: tuple[str, ...]) -> str:
    gone = [name for name in tensors.names() if name.startswith(prefixes)]
    for name in gone:
        del tensors.home(name).entries[name]
    return "|".join(gone)


def _without_mtp(tensors: Tensors) -> str:
    """Lose MTP as transformers does, whose config still promises it."""
    norm = tensors.stored("mtp.layers.0.input_layernorm.weight")
    prefix = norm.removesuffix("attn_norm.weight").removesuffix("layers.0.input_layernorm.weight")
    field = "nextn_predict_layers|" if tensors.artifact.base.gguf else "mtp_num_hidden_layers|"
    return field + _remove_all(tensors, (prefix,))


def _without_layer(tensors: Tensors) -> str:
    norm = tensors.stored("layers.1.input_layernorm.weight")
    prefix = norm.removesuffix("attn_norm.weight").removesuffix("input_layernorm.weight")
    return _remove_all(tensors, (prefix,))


def entry(name: str, dtype: str, *shape: int) -> Entry:
    """Return a tensor of small numbers."""
    info = TensorInfo(name, dtype, shape)
    return Entry(info, (np.arange(info.nbytes) % 64).astype(np.uint8))


def _add(tensors: Tensors, wanted: str, entry: Entry) -> str:
    tensors.files[0].entries[entry.info.name] = replace(entry)
    return wanted


EXTRA = {
    "bias": (
        "q_proj.bias|in_proj_z.bias",
        entry("model.layers.0.linear_attn.in_proj_z.bias", "BF16", 256),
    ),
    "unknown": (
        "model.layers.0.mlp.magic.weight",
        entry("model.layers.0.mlp.magic.weight", "BF16", 4, 4),
    ),
    "rotary": (
        "rotary_emb.inv_freq",
        entry("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", 32),
    ),
    "layer": (
        "layers.7.input_layernorm",
        entry("model.layers.7.input_layernorm.weight", "BF16", 128),
    ),
    "adapter": ("lora_A", entry("model.layers.0.mlp.up_proj.lora_A.weight", "BF16", 8, 128)),
    "kv-scale": ("k_scale", entry("model.layers.3.self_attn.k_scale", "F32", 1)),
    "input-scale": ("input_scale", entry("model.layers.0.mlp.up_proj.input_scale", "F32", 1)),
    "packed": ("weight_packed", entry("model.layers.0.mlp.up_proj.weight_packed", "U8", 4, 4)),
    "head": ("score.weight", entry("score.weight", "BF16", 2, 128)),
    "second-mtp": ("mtp.layers.1", entry("mtp.layers.1.input_layernorm.weight", "BF16", 128)),
}
EXTRA_OF_FILES = {
    "unknown": ("blk.0.magic.weight", entry("blk.0.magic.weight", "F32", 4)),
    "rope-freqs": ("rope_freqs.weight", entry("rope_freqs.weight", "F32", 8)),
    "bias": ("blk.0.attn_qkv.bias", entry("blk.0.attn_qkv.bias", "F32", 640)),
    "scale": ("blk.0.ffn_up.scale", entry("blk.0.ffn_up.scale", "F32", 1)),
    "layer": ("blk.9.attn_norm.weight", entry("blk.9.attn_norm.weight", "F32", 128)),
    "head-of-mtp": (
        "nextn.shared_head_head",
        entry("blk.4.nextn.shared_head_head.weight", "F32", 8, 128),
    ),
    "adapter": ("lora_a", entry("blk.0.ffn_up.weight.lora_a", "F32", 4, 128)),
    "vision": ("v.patch_embd.weight", entry("v.patch_embd.weight", "F32", 4, 4)),
    "classifier": ("cls.output.weight", entry("cls.output.weight", "F32", 2, 128)),
}


def _reorder(tensors: Tensors) -> str:
    """Let the last two of the norms change places: right for any reader, but not what we write."""
    entries = tensors.files[0].entries
    one, two = [name for name in entries if name.endswith("norm.weight")][-2:]
    order = [two if n == one else one if n == two else n for n in entries]
    tensors.files[0].entries = {name: entries[name] for name in order}
    return f"{one}|{two}|{tensors.files[0].path.name}"


def _rename(tensors: Tensors) -> Names:
    """Exchange the names of two norms, not their values."""
    one, two = (tensors.at(f"layers.{i}.post_attention_layernorm.weight") for i in (0, 1))
    one.data, two.data = two.data, one.data
    return one.info.name, two.info.name


def _twice(artifact: Artifact) -> str:
    """Let a name stand twice in a header: readers take the first or the last."""
    path = artifact.tensor_files()[0]
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip()
    name = next(n for n in json.loads(header) if n.endswith("up_proj.weight"))
    said = json.dumps({name: json.loads(header)[name]}, separators=(",", ":")).encode()
    header = header[:-1] + b"," + said[1:]
    header += b" " * (-len(header) % 8)
    artifact.write(path.name, struct.pack("<Q", len(header)) + header + content[8 + length :])
    return name


def _without_metadata(artifact: Artifact) -> str:
    """Say null where metadata stand, which readers take for none."""
    path = artifact.tensor_files()[0]
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.dumps(json.loads(content[8 : 8 + length]) | {"__metadata__": None}).encode()
    header += b" " * (-len(header) % 8)
    artifact.write(path.name, struct.pack("<Q", len(header)) + header + content[8 + length :])
    return "__metadata__"


def _cut(artifact: Artifact, keep: float) -> str:
    path = artifact.tensor_files()[0]
    content = path.read_bytes()
    artifact.write(path.name, content[: int(keep * len(content)) if keep >= 0 else int(keep)])
    return path.name


def _lengthen(artifact: Artifact) -> str:
    path = artifact.tensor_files()[0]
    artifact.write(path.name, path.read_bytes() + bytes(4096))
    return path.name
