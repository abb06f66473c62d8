"""The vision tower that an mmproj file says it has: its sizes, and the tensors these promise.

Source: llama.cpp's `tools/mtmd/clip.cpp` at b11434. Trap: the number of positions is not said, it
follows from the edge of an image and of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping

from formats.errors import FormatError
from formats.family.config_fields import MAX_LAYERS, MAX_SIZE
from formats.family.ops import Shape, shape_after
from formats.family.slots import tower
from formats.gguf.header import Kv
from formats.gguf.keys import shown
from formats.gguf.vision import CHANNELS, FRAMES, VisionTensor, vision_tensors

IMAGE_SIZE = "clip.vision.image_size"
# symbol of the family table: key
SIZE_KEYS = {
    "vH": "clip.vision.embedding_length",
    "vI": "clip.vision.feed_forward_length",
    "vD": "clip.vision.block_count",
    "vNH": "clip.vision.attention.head_count",
    "vP": "clip.vision.patch_size",
    "vM": "clip.vision.spatial_merge_size",
    "vO": "clip.vision.projection_dim",
    "vN": IMAGE_SIZE,
}
# (whole, part): sizes of which the one must be a multiple of the other
MULTIPLES = (("vH", "vNH"), ("vN", "vP"))


def tower_sizes(kv: Mapping[str, Kv]) -> dict[str, int]:
    """Return the sizes of the tower by symbol. FormatError names the key that is no size."""
    most = {"vD": MAX_LAYERS}
    sizes = {s: _size(kv, key, most.get(s, MAX_SIZE)) for s, key in SIZE_KEYS.items()}
    for whole, part in MULTIPLES:
        if sizes[whole] % sizes[part]:
            raise FormatError(
                f"{SIZE_KEYS[whole]} is {sizes[whole]}, "
                f"expected a multiple of {SIZE_KEYS[part]} {sizes[part]}"
            )
    positions = (sizes["vN"] // sizes["vP"]) ** 2
    return sizes | {"vN": positions, "vC": CHANNELS, "vT": FRAMES}


def _size(kv: Mapping[str, Kv], key: str, most: int) -> int:
    if key not in kv:
        raise FormatError(f"{key} is missing")
    value = kv[key].value
    if type(value) is not int or not 1 <= value <= most:
        raise FormatError(f"{key} is {shown(value)}, expected an integer from 1 to {most}")
    return value


def tower_tensors(sizes: Mapping[str, int]) -> dict[str, tuple[VisionTensor, Shape]]:
    """Return every tensor of a tower of these sizes, by name, with its shape."""
    targets = ((slot, target) for slot in tower(sizes) for target in vision_tensors(slot.hub))
    return {target.gguf: (target, shape_after(target.ops, slot.shape)) for slot, target in targets}
