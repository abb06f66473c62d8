"""A choice that no scheme of a recipe leaves open is said to change nothing."""

from __future__ import annotations

import pytest

from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.recipe.unused import unused_notes


@pytest.mark.parametrize(
    ("name", "override", "field"),
    [
        ("fp8-block", "quantize.group=64", "group"),
        ("nvfp4a16", "quantize.group=32", "group"),
        ("int8", "quantize.symmetric=false", "symmetric"),
        ("gguf-q8_0", "quantize.symmetric=false", "symmetric"),
    ],
)
def test_it_is_named(name, override, field):
    (note,) = unused_notes(read_recipe(name, [override]))
    assert note.startswith(f"quantize.{field} is {override.partition('=')[2]} and changes nothing")
    assert note.endswith("as int4 has")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("int4", ["quantize.group=64"]), ("int4-mixed", []), ("int4-g32", []), ("fp8-block", [])],
)
def test_one_that_has_an_effect_is_not(name, overrides):
    assert list(unused_notes(read_recipe(name, overrides))) == []


def test_a_text_that_no_level_reads_is_named():
    text = "verify.text=mine.txt"
    (note,) = unused_notes(read_recipe("fp8-block", [text]))
    assert note.startswith("verify.text is mine.txt and changes nothing: verify.level is tensors")
    for read in ("verify.level=logits", "verify.max_kl=0.1", "verify.min_top1=0.9"):
        assert list(unused_notes(read_recipe("fp8-block", [text, read]))) == []
