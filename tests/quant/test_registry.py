"""A scheme is known to its own file and to the registry; `TABLES` says what else names one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from quant import registry
from quant.fourbit import qweights
from quant.fp8 import scheme as fp8

ROOT = Path(__file__).parents[2]
PACKAGES = ("formats", "quant", "runtime", "qwen35_convert")
NAMES = {*registry.SCHEMES, *(form.name for form in (*fp8.FORMS, *qweights.FORMS.values()))}
OWN = ("quant/fp8", "quant/fourbit")
# What names schemes beside their own files, and what it says of them. A new scheme needs no row
# there: it gets a default, and of engines nothing is said.
TABLES = {
    "formats/gguf/cursor.py": "int8 is a type of numbers",
    "formats/safetensors/file.py": "int8 is a type of numbers",
    "quant/mix/choose.py": "nvfp4 is a mix",
    "quant/mix/llama_cpp_table.py": "nvfp4 is a mix",
    "quant/mix/nvfp4.py": "nvfp4 is a mix",
    "runtime/floors.py": "bytes of a weight, for floors of benchmarks",
    "qwen35_convert/__init__.py": "an example",
    "qwen35_convert/containers/safetensors/container.py": "the default recipe",
    "qwen35_convert/containers/safetensors/engine_fields.py": "what quant_method fp8 may hold",
    "qwen35_convert/containers/safetensors/modelopt.py": "ModelOpt's name of each",
    "qwen35_convert/containers/safetensors/modelopt_fields.py": "what ModelOpt's names need",
    "qwen35_convert/containers/safetensors/quantization_config.py": "names of config groups",
    "qwen35_convert/fit/by_role.py": "measured errors",
    "qwen35_convert/fit/sensitivity.py": "what is measured by default",
    "qwen35_convert/recipe/parts.py": "the default scheme",
    "qwen35_convert/serving/artifact.py": "what engines load",
    "qwen35_convert/serving/engines.py": "what engines load",
    "qwen35_convert/verification/limits.py": "measured KL",
}


def strings(node: ast.AST) -> Iterator[object]:
    """Yield the constants of code; an error may name whatever it is about."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            yield child.value
        elif not isinstance(child, ast.Raise):
            yield from strings(child)


def names_a_scheme(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if not any(f'"{name}"' in text for name in NAMES):
        return False
    return any(isinstance(value, str) and value in NAMES for value in strings(ast.parse(text)))


def test_nothing_names_a_scheme_but_its_file_and_the_tables():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix() for path in files if names_a_scheme(path)}
    assert {path for path in named if not path.startswith(OWN)} - TABLES.keys() == set()


@pytest.mark.parametrize("name", registry.SCHEMES)
def test_the_help_of_quantize_names_every_scheme(name):
    help_ = (ROOT / "tests" / "golden" / "help-quantize.txt").read_text()
    assert name in help_.replace(",", " ").replace(".", " ").split()
