"""What the first conversion of a machine compiles, counted in an empty cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quant.ggml.kinds import WRITABLE
from quant.ggml_types import ggml_type
from quant.registry import OTHER_FORMS, SCHEMES
from qwen35_convert.run import first_use
from tests.qwen35_convert.command import ROOT

# Loops of the recipe's types and of what measures them, with the number of their signatures.
Q8_0 = {"encode_q8_0": 1, "decode_q8_0": 1, "count_scaled": 1}
F32 = {"cast_f32": 2, "count_cast": 1}  # from BF16 and from F32
BOTH = {"add_up": 1}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def convert(source: Path, out: Path, cache: Path, *more: str) -> str:
    """Convert with a cache of loops of its own; return stderr."""
    command = [sys.executable, "-m", "qwen35_convert", "convert", source, "-o", out, "--overwrite"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, command), "--recipe", "gguf-q8_0", *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def compiled(cache: Path) -> dict[str, int]:
    """Return how many signatures of each loop a cache has."""
    names = [re.match(r"\w+\.(\w+)-", path.name)[1] for path in cache.rglob("*.nbc")]
    return {name: names.count(name) for name in names}


@dataclass(frozen=True)
class Use:
    """A conversion: what it said, what had been compiled after it, and its bytes."""

    told: str
    loops: dict[str, int]
    data: bytes


@pytest.fixture(scope="module")
def uses(nano_path, tmp_path_factory) -> list[Use]:
    """The first conversion of a machine, and the second."""
    folder = tmp_path_factory.mktemp("first")
    out, cache = folder / "m.gguf", folder / "cache"
    return [
        Use(convert(nano_path, out, cache), compiled(cache), out.read_bytes()) for _ in range(2)
    ]


@pytest.mark.all
def test_only_what_the_recipe_needs_is_compiled(uses):
    assert [use.loops for use in uses] == [Q8_0 | F32 | BOTH] * 2


@pytest.mark.all
def test_the_user_is_told_once(uses):
    first, second = uses
    assert "compiling loops for q8_0, f32 (first use, a few seconds)" in first.told
    assert "compiling" not in second.told


@pytest.mark.all
def test_bytes_are_those_of_a_second_use(uses):
    assert uses[0].data == uses[1].data


@pytest.mark.all
def test_quiet_says_nothing(nano_path, tmp_path):
    out, cache = tmp_path / "m.gguf", tmp_path / "cache"
    assert "compiling" not in convert(nano_path, out, cache, "--quiet", "--no-verify")
    assert compiled(cache) == {"encode_q8_0": 1, "cast_f32": 2}


@pytest.mark.parametrize(
    "scheme",
    [*SCHEMES.values(), *OTHER_FORMS.values(), *map(ggml_type, WRITABLE)],
    ids=lambda scheme: f"{scheme.name} {scheme.dialect}",
)
def test_blank_parts_are_like_encoded_ones(scheme):
    """What verifies them is compiled for both."""
    torch.manual_seed(0)
    w = torch.randn(first_use.SMALLEST, dtype=torch.bfloat16)
    encoded, blank = scheme.encode(w, scheme.prepare(iter([w]))), first_use.blank_parts(scheme)
    assert {key: seen(data) for key, data in blank.items()} == {
        key: seen(data) for key, data in encoded.items()
    }
    first_use.warm(scheme, verify=True)


def seen(data: torch.Tensor) -> tuple[object, ...]:
    """Return what a loop is compiled for; floats of a GGUF file are encoded as bytes."""
    data = data.view(torch.uint8) if data.dtype in FLOATS else data
    return data.shape, data.dtype, data.stride()


def test_without_names_every_scheme_that_can_be_written_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(first_use, "warm_all", lambda schemes, **_: compiled.extend(schemes))
    first_use.main([])
    assert {scheme.name for scheme in compiled} >= {*SCHEMES, *map(str.lower, WRITABLE)}
    compiled.clear()
    first_use.main(["int4", "q4_k"])
    assert [scheme.name for scheme in compiled] == ["int4", "q4_k"]
