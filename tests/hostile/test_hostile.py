"""Inputs that somebody made to do harm: each is refused with its exit code, cheaply, without trace.

Every case is a good checkpoint that was harmed in one way (see the tables beside this file).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from formats.errors import Qwen35Error
from formats.safetensors.folder import SIDE_FILES
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.hostile import config_cases, folder_cases, gguf_cases, recipe_cases, safetensors_cases
from tests.hostile.case import DONE, Case, link_good, write_good

ROOT = Path(__file__).parents[2]
TABLES = (safetensors_cases, folder_cases, config_cases, gguf_cases, recipe_cases)
CASES = [case for table in TABLES for case in table.cases()]
# Of the processor, not of the clock: the slowest case takes 1 s on an idle core.
MAX_SECONDS = 15.0
WRITTEN = {
    *SIDE_FILES,
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "qwen35-receipt.json",
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good(tmp_path_factory.mktemp("good") / "in")


class Peak:
    """How many bytes this process grew at most since `Peak()`; 0 where Linux does not say it."""

    STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        if self.RESET.exists():
            self.RESET.write_text("5")
        self.start = self._field("VmRSS")

    def grown(self) -> int:
        return self._field("VmHWM") - self.start

    def _field(self, name: str) -> int:
        lines = self.STATUS.read_text().splitlines() if self.RESET.exists() else []
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every name below a folder with what a write would change."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = status.st_size, status.st_mtime_ns
    return found


def prepare(case: Case, good: Path, folder: Path) -> tuple[Path, str]:
    """Make a case's input; return the source and the recipe."""
    source = link_good(good, folder / "in")
    case.harm(source)
    if case.recipe is None:
        return source / case.source, "bf16-split"
    (folder / "recipe.yaml").write_bytes(case.recipe)
    return source / case.source, str(folder / "recipe.yaml")


def convert(source: Path, out: Path, recipe: str, overrides: tuple[str, ...]) -> int:
    """Convert in this process and return the exit code that the command would give."""
    try:
        api.convert(
            source,
            out,
            read_recipe(recipe, overrides),
            options=api.RunOptions(workers=1, verify=False),
        )
    except Qwen35Error as error:
        return error.exit_code
    return DONE


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_hostile_input_is_refused_in_bounded_time_and_memory(case, good, tmp_path, monkeypatch):
    source, recipe = prepare(case, good, tmp_path)
    out, before = tmp_path / "out", tree(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    peak, started = Peak(), time.process_time()
    code = convert(source, out, recipe, case.overrides)
    assert code == case.code
    assert time.process_time() - started < MAX_SECONDS
    assert peak.grown() < case.memory
    after = tree(tmp_path)
    written = {name for name in after if Path(name).parts[0] == "out"}
    assert {name: after[name] for name in after.keys() - written} == before
    allowed = {"out", *(f"out{os.sep}{name}" for name in WRITTEN)} if code == DONE else set()
    assert written <= allowed


def test_there_are_hundreds_of_cases_and_no_name_twice():
    assert len(CASES) >= 300
    assert max(Counter(case.id for case in CASES).values()) == 1


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "qwen35_convert.cli", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [
        "safetensors-header-deep-lists",
        "index-points-to-far-parent",
        "config-word-1e400",
        "gguf-pair-text-length-huge",
        "recipe-alias-bomb",
    ],
)
def test_the_command_prints_one_block_and_no_traceback(name, good, tmp_path):
    case = next(case for case in CASES if case.id == name)
    source, recipe = prepare(case, good, tmp_path)
    done = command("convert", source, "-o", tmp_path / "out", "--recipe", recipe, cwd=tmp_path)
    assert done.returncode == case.code
    assert done.stdout == ""
    assert done.stderr.startswith("qwen35: ")
    assert "Traceback" not in done.stderr
    lines = done.stderr.rstrip("\n").split("\n")
    assert lines[-1] == "  left  nothing was written"
    assert all(line.startswith("  ") for line in lines[1:])
    assert not (tmp_path / "out").exists()
