"""Every bundled recipe writes the same bytes as before: the SHA-256 of each output file.

These hashes were recorded at commit b68bce3, before the restructuring. A change of bytes is a
decision, made by recording them again:

    pytest tests/test_same_bytes.py --update-golden

Receipts and cards are excluded: they contain the version and the text of the recipe. So are recipes
whose codes a text chooses: its sums are those of a machine's matrix products, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwen35_convert.cli import app
from qwen35_convert.recipe.recipe import read_recipe

GOLDEN = Path(__file__).parent / "golden" / "artifact_sha256.json"
Hashes = dict[str, str]


def qwen35(*arguments: object) -> str:
    """Run the command in this process and return its stdout."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.stdout


def recipe_names() -> list[str]:
    """Return the recipes whose bytes are the same everywhere."""
    names = [line.split()[0] for line in qwen35("recipes").splitlines()]
    return [name for name in names if read_recipe(name).quantize.chosen_by is None]


def write(recipe: str, *options: str) -> tuple[str, ...]:
    """Return the arguments that convert by a recipe."""
    out = "model.gguf" if recipe.startswith("gguf-") else "out"
    return ("-o", out, "--recipe", recipe, *options)


SMALL_SHARDS = ("--set", "export.max_shard_size=500KB", "--set", "vision=keep")
CASES = {name: write(name) for name in recipe_names()} | {
    "split GGUF with mmproj": write("gguf-q8_0", *SMALL_SHARDS),
    "sharded folder with vision": write("fp8-block-hub", *SMALL_SHARDS),
    "slice of a folder": write("fp8-channel", "--only", "layers.0.*"),
    "slice of a GGUF": write("gguf-q4_k_m", "--only", "layers.3.*"),
}


def read_golden() -> dict[str, Hashes]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def update_golden(case: str, hashes: Hashes) -> None:
    """Replace the hashes of one case, and drop cases that no longer exist."""
    kept = {name: old for name, old in read_golden().items() if name in CASES}
    cases = dict(sorted((kept | {case: hashes}).items()))
    GOLDEN.write_text(json.dumps(cases, indent=1) + "\n")


def hash_files(folder: Path) -> Hashes:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("receipt.json", "README.md"))
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_writes_the_same_bytes_as_before(
    request: pytest.FixtureRequest, folder: Path, nano: Path, case: str
) -> None:
    qwen35("convert", nano, *CASES[case], "--no-verify")
    hashes = hash_files(folder)
    if request.config.getoption("--update-golden"):
        update_golden(case, hashes)
    assert hashes == read_golden().get(case), f"{case}: review, then record with --update-golden"


def test_the_golden_file_has_exactly_these_cases() -> None:
    assert read_golden().keys() == CASES.keys()
