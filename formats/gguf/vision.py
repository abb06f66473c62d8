"""The vision tower in a file of its own, as llama.cpp reads it: `mmproj-NAME.gguf`.

    visual.blocks.3.attn.qkv.weight    v.blk.3.attn_qkv.weight
    visual.merger.linear_fc1.weight    mm.0.weight
    visual.patch_embed.proj.weight     v.patch_embd.weight, v.patch_embd.weight.1: one per frame

Source: llama.cpp's `conversion/qwen3vl.py` and `tools/mtmd/models/qwen3vl.cpp` at b11434. Traps:
the norms are stored as they are (no 1 + w); what the tower projects to is the text's hidden size;
its epsilon is 1e-6 in the model's code, whatever the text's is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, isqrt
from typing import Any

from formats.errors import FormatError
from formats.family.config import Config
from formats.family.moves import Take
from formats.family.ops import Op
from formats.family.rules import template
from formats.gguf.header import Kv
from formats.json_file import parse_object
from formats.safetensors.file import TORCH_NAMES
from formats.side_names import IMAGES, PROCESSOR

# side file, and its part that counts as much as its top; later ones override earlier ones
PREPROCESSORS = (
    (IMAGES, "media_proc_cfg"),
    (PROCESSOR, "image_processor"),
)
FRAMES = 2
CHANNELS = 3
EPSILON = 1e-6
ACTIVATION = "gelu_pytorch_tanh"
QUANTIZATION_VERSION = 2
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class VisionTensor:
    """A tensor of the mmproj file: its name, its type, what is done to the hub's tensor.

    kind  "out": the type that was asked for; "f32": always F32; "patch": F16 if that was asked
          for, F32 otherwise
    """

    gguf: str
    kind: str
    ops: tuple[Op, ...] = ()

    def dtype(self, out: str) -> str:
        """Return its type in a file whose weights are `out`, before any fallback for its shape."""
        if self.kind == "out" or (self.kind == "patch" and out == "F16"):
            return out
        return "F32"

    def takes(self, dtype: str) -> bool:
        """Whether llama.cpp computes with it in this type; it aborts over a bias in F16."""
        plain = dtype in PLAIN
        kinds = {"out": plain or dtype not in TORCH_NAMES, "f32": dtype == "F32", "patch": plain}
        return kinds[self.kind]


def _linear(hub: str, gguf: str) -> dict[str, tuple[VisionTensor, ...]]:
    return {
        f"{hub}.weight": (VisionTensor(f"{gguf}.weight", "out"),),
        f"{hub}.bias": (VisionTensor(f"{gguf}.bias", "f32"),),
    }


def _norm(hub: str, gguf: str) -> dict[str, tuple[VisionTensor, ...]]:
    parts = ("weight", "bias")
    return {f"{hub}.{part}": (VisionTensor(f"{gguf}.{part}", "f32"),) for part in parts}


# Name in the family table -> tensors of the mmproj file; `{i}` is a vision block.
VISION_NAMES: Mapping[str, tuple[VisionTensor, ...]] = {
    **_linear("visual.blocks.{i}.attn.qkv", "v.blk.{i}.attn_qkv"),
    **_linear("visual.blocks.{i}.attn.proj", "v.blk.{i}.attn_out"),
    **_linear("visual.blocks.{i}.mlp.linear_fc1", "v.blk.{i}.ffn_up"),
    **_linear("visual.blocks.{i}.mlp.linear_fc2", "v.blk.{i}.ffn_down"),
    **_norm("visual.blocks.{i}.norm1", "v.blk.{i}.ln1"),
    **_norm("visual.blocks.{i}.norm2", "v.blk.{i}.ln2"),
    **_linear("visual.merger.linear_fc1", "mm.0"),
    **_linear("visual.merger.linear_fc2", "mm.2"),
    **_norm("visual.merger.norm", "v.post_ln"),
    "visual.patch_embed.proj.weight": (
        VisionTensor("v.patch_embd.weight", "patch", (Take(2, 0),)),
        VisionTensor("v.patch_embd.weight.1", "patch", (Take(2, 1),)),
    ),
    "visual.patch_embed.proj.bias": (VisionTensor("v.patch_embd.bias", "f32"),),
    "visual.pos_embed.weight": (VisionTensor("v.position_embd.weight", "f32"),),
}


def vision_tensors(hub: str) -> tuple[VisionTensor, ...]:
    """Return what a tensor of the family table becomes, block numbers filled in.

    >>> [tensor.gguf for tensor in vision_tensors("visual.blocks.3.norm1.bias")]
    ['v.blk.3.ln1.bias']
    """
    key, numbers = template(hub)
    targets = VISION_NAMES[key.replace("#", "{i}")]
    block = str(numbers[0]) if numbers else ""
    return tuple(replace(t, gguf=t.gguf.replace("{i}", block)) for t in targets)


def read_preprocessor(side: Callable[[str], bytes | None]) -> dict[str, Any]:
    """Return how images are prepared, from the side files that say so; empty if none does."""
    merged: dict[str, Any] = {}
    for name, part in PREPROCESSORS:
        content = side(name)
        if content is None:
            continue
        stated = parse_object(content, name)
        inner = stated.get(part, {})
        if not isinstance(inner, dict):
            raise FormatError(f"{name}: {part} is not an object")
        merged |= stated | inner
    return merged


def mmproj_metadata(
    config: Config, preprocessor: Mapping[str, Any], *, name: str, size_label: str, file_type: int
) -> list[Kv]:
    """Return every pair of an mmproj file, in llama.cpp's order.

    preprocessor  what `read_preprocessor` returns
    file_type     llama.cpp's number: 0 F32, 1 F16, 7 Q8_0, 32 BF16

    FormatError if there is no vision tower, if llama.cpp has no place for one like this, or if it
    is not said how images are prepared.
    """
    _check_tower(config)
    s = config.sizes
    rows = (
        ("general.architecture", "string", "clip"),
        ("general.type", "string", "mmproj"),
        ("general.name", "string", name),
        ("general.size_label", "string", size_label),
        ("general.file_type", "uint32", file_type),
        ("clip.has_vision_encoder", "bool", True),
        ("clip.vision.projection_dim", "uint32", s["H"]),
        ("clip.vision.image_size", "uint32", _image_size(config)),
        ("clip.vision.patch_size", "uint32", s["vP"]),
        ("clip.vision.embedding_length", "uint32", s["vH"]),
        ("clip.vision.feed_forward_length", "uint32", s["vI"]),
        ("clip.vision.block_count", "uint32", s["vD"]),
        ("clip.vision.attention.head_count", "uint32", s["vNH"]),
        ("clip.vision.image_mean", "array[float32]", _channels(preprocessor, "image_mean")),
        ("clip.vision.image_std", "array[float32]", _channels(preprocessor, "image_std")),
        ("clip.projector_type", "string", "qwen3vl_merger"),
        ("clip.use_gelu", "bool", True),
        ("clip.vision.spatial_merge_size", "uint32", s["vM"]),
        ("clip.vision.attention.layer_norm_epsilon", "float32", EPSILON),
        ("clip.vision.is_deepstack_layers", "array[bool]", [False] * s["vD"]),
        ("general.quantization_version", "uint32", QUANTIZATION_VERSION),
    )
    return [Kv(*row) for row in rows]


def _check_tower(config: Config) -> None:
    """Refuse what llama.cpp's projector "qwen3vl_merger" does not compute."""
    if config.vision is None:
        raise FormatError("config.json: vision_config is missing, expected a vision tower")
    for symbol, expected, why in (
        ("vT", FRAMES, "the patch embedding has one tensor for each of two frames"),
        ("vC", CHANNELS, "images have three channels"),
        ("vO", config.sizes["H"], f"the tower ends at {config.fields['H']}"),
    ):
        if config.sizes[symbol] != expected:
            raise FormatError(
                f"{config.origin}: {config.fields[symbol]} is {config.sizes[symbol]}, "
                f"expected {expected} for an mmproj file\n  why   {why}"
            )
    act, deep = config.vision.get("hidden_act"), config.vision.get("deepstack_visual_indexes")
    if act not in (None, ACTIVATION):
        raise FormatError(
            f"{config.origin}: vision_config.hidden_act is {act!r}, expected {ACTIVATION!r}"
        )
    if deep:
        raise FormatError(
            f"{config.origin}: vision_config.deepstack_visual_indexes is {deep!r}, expected none\n"
            "  why   the Qwen3.5 family has no deepstack"
        )


def _image_size(config: Config) -> int:
    """Return the edge in pixels of the square of positions that is stored."""
    count, patch = config.sizes["vN"], config.sizes["vP"]
    edge = isqrt(count)
    if edge * edge != count:
        raise FormatError(
            f"{config.origin}: {config.fields['vN']} is {count}, "
            "expected a square for an mmproj file"
        )
    stated = (config.vision or {}).get("image_size")
    if stated not in (None, edge * patch):
        raise FormatError(
            f"{config.origin}: vision_config.image_size is {stated!r}, expected {edge * patch} "
            f"({config.fields['vN']} {count}, {config.fields['vP']} {patch})"
        )
    return edge * patch


def _channels(preprocessor: Mapping[str, Any], field: str) -> list[float]:
    """Return one number per channel; a deviation is divided by and so is not 0."""
    value = preprocessor.get(field)
    if value is None:
        raise FormatError(
            f"preprocessor_config.json: {field} is missing, and an mmproj file says it\n"
            "  fix   take the file from the original repository, or leave the vision tower out"
        )
    numbers = value if isinstance(value, list) else []
    good = [float(x) for x in numbers if type(x) in (int, float) and isfinite(x)]
    if len(numbers) != CHANNELS or len(good) != CHANNELS or (field == "image_std" and 0 in good):
        raise FormatError(
            f"preprocessor_config.json: {field} is {value!r}, expected {CHANNELS} numbers"
            f"{' other than 0' if field == 'image_std' else ''}"
        )
    return good
