"""How the preprocessors of images and videos differ, in whichever file their fields stand.

transformers writes them into files of their own, or into processor_config.json, where nested fields
have precedence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.side_names import IMAGES, PROCESSOR, VIDEOS
from qwen35_convert.containers.safetensors.sides.fields import Fields
from qwen35_convert.containers.safetensors.sides.reader import Sides
from qwen35_convert.difference import differences, near

# Of another, or of none, transformers takes the tokenizer for the processor.
PROCESSOR_CLASS = "Qwen3VLProcessor"
NESTED = {IMAGES: "image_processor", VIDEOS: "video_processor"}
# One class and what runs it: torchvision, PIL.
CLASSES = {
    "Qwen2VLImageProcessorFast": "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorPil": "Qwen2VLImageProcessor",
}
TYPES = ("image_processor_type", "video_processor_type")
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
ALWAYS = {
    "auto_map": None,
    "data_format": "channels_first",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": False,
    "do_center_crop": False,
    "do_rescale": True,
    "do_resize": True,
    "merge_size": 2,
    "processor_class": PROCESSOR_CLASS,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}
RECORDS = frozenset(
    {"default_to_square", "device", "disable_grouping", "input_data_format", "return_tensors"}
)
# What the classes of transformers do where a file is silent.
FIELDS = {
    IMAGES: Fields(
        ALWAYS
        | {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "patch_size": 14,
            "size": {"shortest_edge": 3136, "longest_edge": 1003520},
            "image_processor_type": "Qwen2VLImageProcessor",
        },
        RECORDS,
    ),
    VIDEOS: Fields(
        ALWAYS
        | {
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "patch_size": 16,
            "size": {"shortest_edge": 131072, "longest_edge": 786432},
            "video_processor_type": "Qwen3VLVideoProcessor",
            "do_sample_frames": True,
            "fps": 2,
            "num_frames": None,
            "min_frames": 4,
            "max_frames": 768,
            "max_video_tokens": 768,
        },
        RECORDS,
    ),
}


def images(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare preprocessor_config.json."""
    yield from _of_kind(IMAGES, ours.object(IMAGES), theirs)


def videos(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare video_preprocessor_config.json."""
    yield from _of_kind(VIDEOS, ours.object(VIDEOS), theirs)


def processor(ours: Sides, theirs: Sides) -> Iterator[str]:
    """Compare processor_config.json: nested preprocessors, and fields that they have elsewhere."""
    stated, known = ours.object(PROCESSOR), theirs.object(PROCESSOR)
    for kind, nested in NESTED.items():
        inner = stated.get(nested)
        if isinstance(inner, dict):
            yield from (f"{nested}.{sentence}" for sentence in _of_kind(kind, inner, theirs))
    plain = _effective(IMAGES, theirs) | _effective(VIDEOS, theirs) | known
    for key in stated:
        if key in {*plain, "auto_map"} - {*NESTED.values()}:
            yield from differences(stated[key], plain.get(key), key, near)


def nests(sides: Sides, kind: str) -> bool:
    """Whether processor_config.json has the fields of a preprocessor's own file."""
    return isinstance(sides.object(PROCESSOR).get(NESTED[kind]), dict)


def _of_kind(kind: str, stated: Mapping[str, Any], theirs: Sides) -> Iterator[str]:
    expected = _effective(kind, theirs)
    if expected:
        yield from FIELDS[kind].differences(_spelled(stated), _spelled(expected))


def _effective(kind: str, sides: Sides) -> dict[str, Any]:
    if nests(sides, kind):
        return dict(sides.object(PROCESSOR)[NESTED[kind]])
    return sides.object(kind)


def _spelled(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in one spelling: sizes as edges, classes without what runs them."""
    size = stated.get("size")
    named = {edge: stated[k] for k, edge in EDGES.items() if stated.get(k) is not None}
    edges = {"size": {**(size if isinstance(size, dict) else {}), **named}} if named else {}
    rest = {key: value for key, value in stated.items() if key not in EDGES}
    types = {key: _class(rest[key]) for key in TYPES if key in rest}
    return rest | edges | types


def _class(name: Any) -> Any:
    return CLASSES.get(name, name) if isinstance(name, str) else name
