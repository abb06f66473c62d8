"""The vision tower's file beside a GGUF model: `mmproj-NAME.gguf`, planned from the same source.

Its weights follow F32, F16, BF16 and Q8_0, as llama.cpp's converter does; beside any other mix they
stay BF16: the tower is small, and images suffer more than text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.ops import shape_after
from formats.gguf.header import Kv
from formats.gguf.metadata import sampling_pairs, size_label, title
from formats.gguf.vision import (
    VisionTensor,
    mmproj_metadata,
    read_preprocessor,
    vision_tensors,
)
from formats.json_file import parse_object
from formats.side_names import GENERATION
from formats.tensor import TensorInfo
from quant.ggml.kinds import fallback
from quant.ggml.scheme import BLOCKS, Ggml
from quant.mix.choose import FILE_TYPES
from qwen35_convert.containers.gguf.shards import gguf_shard
from qwen35_convert.planning.plan import Item, Output, Shard
from qwen35_convert.recipe.recipe import Recipe

FOLLOWED = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
OTHERWISE = "bf16"


def mmproj_name(stem: str) -> str:
    """Return the name of the vision file beside `stem`.gguf."""
    return f"mmproj-{stem}.gguf"


def mmproj_part(
    source: Checkpoint, recipe: Recipe, atoms: Sequence[Atom], stem: str
) -> tuple[tuple[Item, ...], tuple[Shard, ...]]:
    """Return items and file of the vision tower; nothing if the recipe drops it.

    FormatError if it is to be kept and the source has none, or llama.cpp has no place for it.
    """
    if recipe.vision == "drop":
        return (), ()
    if not atoms:
        raise FormatError("the checkpoint has no vision tensors\n  fix   set vision to drop")
    scheme = recipe.quantize.scheme
    mix = scheme if scheme in FOLLOWED else OTHERWISE
    tensors = [
        (atom, target, _info(atom, target, FOLLOWED[mix]))
        for atom in atoms
        for target in vision_tensors(atom.hub)
    ]
    items = tuple(_item(atom, target, info, mix) for atom, target, info in tensors)
    infos = [info for _, _, info in tensors]
    shard = gguf_shard(mmproj_name(stem), _pairs(source, infos, mix), infos)
    return items, (shard,)


def _info(atom: Atom, target: VisionTensor, out: str) -> TensorInfo:
    shape = shape_after(target.ops, atom.shape)
    return TensorInfo(target.gguf, fallback(target.dtype(out), shape[-1]), shape)


def _item(atom: Atom, target: VisionTensor, info: TensorInfo, mix: str) -> Item:
    output = Output(BLOCKS, info.name, 0, info.nbytes)
    reason = f"vision beside {mix}" if info.dtype != "F32" else "vision: F32 in every file"
    return Item(atom, Ggml(info.dtype), (output,), reason, target.ops)


def _pairs(source: Checkpoint, infos: Sequence[TensorInfo], mix: str) -> list[Kv]:
    pairs = mmproj_metadata(
        source.config,
        read_preprocessor(source.side),
        name=title(source.name),
        size_label=size_label(infos),
        file_type=FILE_TYPES[mix],
    )
    return [*pairs[:2], *sampling_pairs(read_generation(source) or {}), *pairs[2:]]


def read_generation(source: Checkpoint) -> dict[str, Any] | None:
    """Return generation_config.json, None if the source has none."""
    content = source.side(GENERATION)
    return None if content is None else parse_object(content, GENERATION)
