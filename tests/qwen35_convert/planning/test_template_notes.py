"""A chat template that says the same of every chat is carried, with a note."""

import pytest

from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.planning.side_files import check_sides, side_notes
from tests.variants import nano


@pytest.mark.parametrize(
    ("text", "noted"), [("./chat.jinja", True), ("{{ messages }}", False), ("", False)]
)
def test_a_template_without_places_is_noted(tmp_path, text, noted):
    source = open_checkpoint(nano(tmp_path / "in", files={"chat_template.jinja": text}))
    check_sides(source)
    notes = [note for note in side_notes(source) if "no place for messages" in note]
    assert bool(notes) == noted
