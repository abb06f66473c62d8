"""The Python API from outside: its functions, its example, its types, and how little it imports."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import venv
from inspect import getmembers, isfunction
from pathlib import Path

import pytest

import qwen35_convert
from qwen35_convert import api, measuring
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import read_recipe

ROOT = Path(__file__).parents[2]
FUNCTIONS = (
    "inspect",
    "plan",
    "convert",
    "quantize",
    "verify",
    "compare",
    "bench",
    "imatrix",
    "read_recipe",
    "download",
    "run_text",
)
USE = """
import qwen35_convert as q
from qwen35_convert import verify

reveal_type(q.read_recipe("fp8-block", ["quantize.scale=float32"]))
reveal_type(q.inspect("in"))
reveal_type(q.plan("in", "fp8-block").nbytes)
reveal_type(q.convert("in", "out", q.Recipe(), q.RunOptions(workers=1, overwrite=True)))
reveal_type(q.quantize("in", "out", "fp8-channel"))
reveal_type(verify("out", against="in", level="logits", logits=q.LogitsCheck(max_kl=0.01)))
reveal_type(q.imatrix("in", "imatrix.gguf", chunks=2).unseen)
reveal_type(q.bench("out", q.Sweep(device="cpu")).points[0].ms)
reveal_type(q.convert("in", "out").report)
reveal_type(q.RunOptions().workers)
q.RunOptions(workers="many")
q.convert("in", "out", 8)
q.verify()
"""
REVEALED = (
    "qwen35_convert.recipe.recipe.Recipe",
    "qwen35_convert.inspection.inspect.Inspection",
    "int",
    "qwen35_convert.artifact.Conversion",
    "qwen35_convert.artifact.Conversion",
    "qwen35_convert.verification.verify.Report",
    "list[str]",
    "float",
    "qwen35_convert.verification.verify.Report | None",
    "int | None",
)
REFUSED = ("arg-type", "arg-type", "call-arg")


def in_new_process(code: str) -> str:
    """Return what a program prints, run from the checkout."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_every_name_is_what_it_says_also_after_all_submodules_were_imported():
    code = (
        "import importlib, inspect, json, pkgutil, qwen35_convert as q\n"
        "for module in pkgutil.walk_packages(q.__path__, 'qwen35_convert.'):\n"
        "    if module.name.rsplit('.', 1)[-1] not in ('vllm_peer', 'ray_cluster'):\n"
        "        importlib.import_module(module.name)\n"
        "from qwen35_convert import verify\n"
        "assert inspect.isfunction(verify)\n"
        f"assert all(inspect.isfunction(getattr(q, name)) for name in {FUNCTIONS})\n"
        "print(json.dumps([name for name in q.__all__ if inspect.ismodule(getattr(q, name))]))\n"
    )
    assert json.loads(in_new_process(code)) == []


def own_functions(module):
    public = {name for name, _ in getmembers(module, isfunction) if not name.startswith("_")}
    return {name for name in public if getattr(module, name).__module__ == module.__name__}


def test_what_is_named_is_what_the_api_has():
    assert qwen35_convert.__all__ == sorted(dir(qwen35_convert))
    for name in qwen35_convert.__all__:
        home = qwen35_convert.HOMES.get(name, api.__name__)
        assert getattr(qwen35_convert, name).__module__ == home
    assert own_functions(api) == {*qwen35_convert.__all__} - qwen35_convert.HOMES.keys()
    homes = qwen35_convert.HOMES.items()
    assert own_functions(measuring) == {name for name, at in homes if at == measuring.__name__}
    for name in FUNCTIONS:
        assert isfunction(getattr(qwen35_convert, name))
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        _ = qwen35_convert.convrt


def test_importing_it_imports_nothing_heavy():
    code = (
        "import sys, qwen35_convert\n"
        "print({'torch', 'numpy', 'numba', 'pydantic', 'huggingface_hub'} & set(sys.modules))"
    )
    assert in_new_process(code).strip() == "set()"


def test_the_example_of_the_docstring_runs(tmp_path, nano, monkeypatch):
    (tmp_path / "nano-dense").symlink_to(nano)
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(qwen35_convert, raise_on_error=True)
    assert results.attempted >= 7
    assert results.failed == 0


@pytest.mark.parametrize("kind", [str, Path, "recipe"])
def test_a_recipe_is_a_name_a_path_or_a_recipe(tmp_path, nano, kind):
    file = tmp_path / "mine.yaml"
    file.write_text("quantize: {scheme: fp8-channel}\n")
    given = read_recipe(str(file)) if kind == "recipe" else kind(file)
    changes = ["quantize.scale=float32"]
    expected = read_recipe(str(file), changes)
    assert api.plan(nano, given, overrides=changes).recipe == expected
    assert read_recipe(file, changes) == expected
    with pytest.raises(RecipeError, match="did you mean 'scale'"):
        api.convert(nano, tmp_path / "out", given, overrides=["quantize.skale=float32"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', expected cpu or cuda"),
        ({"executor": "spark"}, "executor is 'spark', expected threads or ray"),
        ({"workers": 0}, "workers is 0, expected 1 or more"),
        ({"stream": True, "executor": "ray"}, "whose nodes cannot read a stream"),
    ],
)
def test_options_that_cannot_be_are_refused_when_they_are_made(wrong, message):
    with pytest.raises(RecipeError, match=message):
        api.RunOptions(**wrong)


@pytest.fixture(scope="module")
def python_with_qwen35(tmp_path_factory) -> Path:
    """Return an interpreter that has our packages on its path, as an installation has."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "qwen35.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


@pytest.mark.all
def test_mypy_sees_the_types_from_outside(tmp_path, python_with_qwen35):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(python_with_qwen35),
        "--cache-dir",
        str(tmp_path / "cache"),
        "use.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert revealed == list(REVEALED), done.stdout
    errors = [line.rsplit("[", 1)[1].rstrip("]") for line in lines if ": error:" in line]
    assert errors == list(REFUSED), done.stdout
