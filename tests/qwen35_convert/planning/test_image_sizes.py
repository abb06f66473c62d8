"""Preprocessors that cut other patches than the vision tower takes are named."""

from __future__ import annotations

import pytest

from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.image_sizes import SIZES, image_sizes
from qwen35_convert.planning.side_files import image_notes
from tests.variants import nano

RIGHT = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
FILES = {
    "preprocessor_config.json": "",
    "video_preprocessor_config.json": "",
    "processor_config.json": "image_processor",
}


def source(folder, name, fields):
    """Return the bundled model with these fields in one of its preprocessors."""
    part = FILES[name]
    return open_checkpoint(nano(folder / "in", files={name: {part: fields} if part else fields}))


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("name", FILES)
def test_another_size_is_named(tmp_path, name, field):
    other = RIGHT | {field: RIGHT[field] + 1}
    ((file, problem),) = image_sizes(source(tmp_path, name, other))
    said = f"{field} is {other[field]}, expected {RIGHT[field]} (vision_config.{SIZES[field]})"
    assert (file, problem) == (name, f"{FILES[name]}.{said}".removeprefix("."))


def test_a_plan_notes_it(tmp_path):
    """It fails nothing: text is served from such a folder all the same."""
    opened = source(tmp_path, "processor_config.json", {"merge_size": 4})
    (note,) = [note for note in image_notes(opened) if "merge_size" in note]
    said = "image_processor.merge_size is 4, expected 2 (vision_config.spatial_merge_size)"
    assert note.startswith(f"processor_config.json: {said}: engines fail on images")


@pytest.mark.parametrize("fields", [RIGHT, {}, {"patch_size": None}])
@pytest.mark.parametrize("name", FILES)
def test_the_tower_s_own_and_none_are_not(tmp_path, name, fields):
    assert list(image_sizes(source(tmp_path, name, fields))) == []
