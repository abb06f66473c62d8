"""What works on macOS, shown by taking away what only Linux has; and that Windows is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = "In the beginning God created the heaven and the earth. " * 4


def test_convert_verify_and_run_need_nothing_that_macos_lacks(nano, tmp_path):
    text, folder, file = tmp_path / "text.txt", tmp_path / "out", tmp_path / "out.gguf"
    text.write_text(TEXT)
    commands = (
        f"convert {nano} -o {folder}",
        f"convert {nano} -o {folder} --overwrite --recipe fp8-channel",
        f"convert {nano} -o {file} --recipe gguf-q4_k_m",
        f"verify {folder} --against {nano} --level logits --text {text}",
        f"inspect {file}",
        f"run {folder} --prompt In --max-tokens 2",
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.without_linux"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input="\n".join(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "passed      level logits" in done.stdout
    assert folder.is_dir()
    assert file.is_file()


def test_windows_is_refused_in_one_line():
    code = (
        "import sys, typer\n"
        "sys.modules.update(dict.fromkeys(('fcntl', 'resource')))  # Windows has neither\n"
        "sys.platform, sys.argv = 'win32', ['qwen35', 'recipes']\n"
        "from qwen35_convert import cli\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr == "qwen35: Windows is not supported; use WSL, which is Linux\n"
