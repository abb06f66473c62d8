"""The fuzzers in small: every seed and a second of mutations; `make fuzz` is the long run."""

from __future__ import annotations

import pytest

from tests.fuzz import fuzz_config, fuzz_gguf, fuzz_recipe, fuzz_safetensors
from tests.fuzz.loop import run_plain

FUZZERS = {
    "safetensors": fuzz_safetensors,
    "config": fuzz_config,
    "gguf": fuzz_gguf,
    "recipe": fuzz_recipe,
}


@pytest.mark.parametrize("name", FUZZERS)
def test_mutated_seeds_are_read_or_refused_by_the_parsers_own_error(name):
    assert run_plain(name, FUZZERS[name].TestOneInput, FUZZERS[name].WORDS, seconds=1.0) > 10
