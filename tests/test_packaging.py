"""The wheel holds four packages and the recipes; a foreign package of our name is refused."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"qwen35_convert", "quant", "runtime", "formats"}


def test_the_wheel_has_exactly_the_four_packages(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/", 1)[0] for name in names}
    (info,) = (name for name in top if name.endswith(".dist-info"))
    assert top - {info} == PACKAGES
    recipes = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert {f"qwen35_convert/recipes/{name}" for name in recipes} <= set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert "qwen35_convert/page/style.css" in names


def test_a_foreign_package_of_our_name_is_refused(tmp_path):
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "__init__.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import qwen35_convert"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs its own package 'quant'" in done.stderr
    assert str(tmp_path) in done.stderr
