"""The pages of docs/ that follow from the code; `python -m tests.generated` writes them.

docs/commands.md  what `--help` of every command says
docs/python.md    the docstrings of the Python API
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

DOCS = Path(__file__).parent.parent / "docs"
WRITTEN = "<!-- written by python -m tests.generated -->"


def commands() -> str:
    """Return docs/commands.md."""
    from qwen35_convert.cli import app

    runner = CliRunner(env={"COLUMNS": "100"})
    names = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    parts = ["# Commands", WRITTEN]
    for name in names:
        shown = runner.invoke(app, [name, "--help"], prog_name="qwen35").output.strip()
        parts += [f"## {name}", f"```\n{shown}\n```"]
    return "\n\n".join(parts) + "\n"


def python() -> str:
    """Return docs/python.md."""
    import qwen35_convert

    return "\n\n".join(_parts(qwen35_convert)) + "\n"


def _parts(package) -> Iterator[str]:
    head, *rest = inspect.getdoc(package).split("\n\n")
    yield from ("# The Python API", WRITTEN, f"`import qwen35_convert`: {head}")
    for part in rest:
        yield f"```python\n{inspect.cleandoc(part)}\n```" if ">>>" in part else part
    things = {name: getattr(package, name) for name in package.__all__}
    yield "## Functions"
    for thing in things.values():
        if not inspect.isclass(thing):
            yield f"```python\n{_signature(thing)}\n```"
            yield _text(thing)
    yield "## Options, results and errors"
    for name, thing in things.items():
        if inspect.isclass(thing):
            yield f"`{name}`"
            yield _text(thing)


def _text(thing) -> str:
    """Return a docstring, its columns in a block."""
    shown = []
    for part in inspect.getdoc(thing).split("\n\n"):
        aligned = re.search(r"^\S+ {2,}\S", part, re.MULTILINE)
        shown.append(f"```\n{part}\n```" if aligned else part)
    return "\n\n".join(shown)


def _signature(function) -> str:
    """Return a function's signature as its source has it."""
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef), "a function of the API is defined by def"
    return f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


PAGES = {"commands.md": commands, "python.md": python}


def main() -> None:
    os.environ["COLUMNS"] = "100"
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
