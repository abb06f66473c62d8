"""Planning loads nothing that computes: `--plan` of any recipe answers without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import qwen35_convert as q
from qwen35_convert.recipe.files import bundled_recipes
from tests.checkpoints import moe

ROOT = Path(__file__).parents[3]
PLANS = """
import sys
import qwen35_convert as q
source, *recipes = sys.argv[1:]
for name in recipes:
    out = "x.gguf" if name.startswith("gguf") else "x"
    try:
        q.plan(source, name, out)
    except q.QuantError as error:
        assert "importance matrix" in str(error), error
    loaded = {"torch", "triton", "numba"} & set(sys.modules)
    assert not loaded, f"{name} loads {loaded}"
"""


def light(source: Path, names: list[str]) -> None:
    command = [sys.executable, "-c", PLANS, str(source), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_every_recipe_is_planned_without_torch(nano):
    light(nano, bundled_recipes())


def test_so_is_a_gguf_file(nano, tmp_path):
    options = q.RunOptions(verify=False)
    q.convert(nano, tmp_path / "in.gguf", "gguf-q8_0", options)
    light(tmp_path / "in.gguf", ["gguf-q8_0", "gguf-q4_k_m", "bf16-split", "fp8-block"])


def test_so_are_experts(tmp_path):
    light(moe(tmp_path / "moe", sizes="blocky"), ["fp8-block", "int4-g32", "nvfp4a16"])
