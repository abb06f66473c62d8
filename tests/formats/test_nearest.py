"""Which known name is offered for one that is not known."""

from __future__ import annotations

import pytest

from formats.nearest import nearest

RECIPES = ("bf16-split", "fp8-block", "fp8-block-gdn", "gguf-q4_k_m", "gguf-q8_0", "int4", "int8")


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("Q4_K_M", "gguf-q4_k_m"),
        ("q4_k_m", "gguf-q4_k_m"),
        ("Q8-0", "gguf-q8_0"),
        ("GGUF-Q4_K_M", "gguf-q4_k_m"),
        ("gguf_q4_km", "gguf-q4_k_m"),
        ("fp8", "fp8-block"),
        ("FP8_BLOCK", "fp8-block"),
        ("gdn", "fp8-block-gdn"),
        ("bf16", "bf16-split"),
        ("fp8-blok", "fp8-block"),
        ("int5", "int8"),
    ],
)
def test_the_name_that_was_meant_is_offered(name, offered):
    assert nearest(name, RECIPES) == offered


@pytest.mark.parametrize("name", ["", "_", "zzzzzz", ".", "a\0b", "4"])
def test_nothing_is_offered_for_a_name_that_is_near_none(name):
    assert nearest(name, RECIPES) is None
