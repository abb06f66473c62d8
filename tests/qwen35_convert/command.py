"""The command as users run it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]


def qwen35(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command; nothing is read from the hub."""
    command = [sys.executable, "-m", "qwen35_convert", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def called(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which has loaded what takes long."""
    from qwen35_convert.cli import run_words

    words = [*map(str, arguments)]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = run_words(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
