"""Sizes of patches that preprocessors cut, held against those that the vision tower takes.

A tower takes patches of patch_size times temporal_patch_size, and merges squares of them. Where
patches are cut otherwise engines fail at the first product, or count other tokens of an image.

Source: transformers' `Qwen3_5VisionPatchEmbed`, `Qwen2VLImageProcessor`, `Qwen3VLVideoProcessor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.json_file import parse_object
from qwen35_convert.planning.side_kinds import NESTED, OF_FILES

# a preprocessor's field: the tower's
SIZES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def image_sizes(source: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (file, problem) of each size that is not the tower's, where there is a tower."""
    tower = source.config.vision or {}
    for name, prefix, fields in _preprocessors(source) if source.layout.form.vision else ():
        for field, its in SIZES.items():
            got, expected = fields.get(field), tower.get(its)
            if None not in (got, expected) and got != expected:
                expects = f"expected {expected} (vision_config.{its})"
                yield name, f"{prefix}{field} is {got!r:.120}, {expects}"


def _preprocessors(source: Checkpoint) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (file, prefix, fields) of each, in a file of its own or nested."""
    for name, known in OF_FILES.items():
        content = source.side(name) if known.keys() & {*SIZES, *NESTED} else None
        value = {} if content is None else parse_object(content, name)
        yield name, "", value
        for part in known.keys() & NESTED.keys():
            yield name, f"{part}.", value.get(part) or {}
