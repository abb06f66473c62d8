"""An error comes at once: nothing is loaded that a refusal does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.qwen35_convert.command import ROOT

NOWHERE = "/no/such/folder"
TO_X = ["-o", "x"]
# {nano} is a whole model, {full} a folder that holds something else, {bad} has a broken config.json
MISTAKES = {
    "inspect": (["inspect", NOWHERE], 3),
    "convert": (["convert", "nofolder", *TO_X], 3),
    "a broken config.json": (["convert", "{bad}", *TO_X], 3),
    "OUT holds something": (["convert", "{nano}", "-o", "{full}"], 4),
    "an unknown recipe": (["convert", "nofolder", *TO_X, "--recipe", "nope"], 2),
    "an unknown key": (["convert", "{nano}", *TO_X, "--recipe", "int4", "--set", "nope=1"], 2),
    "an unknown flag": (["convert", "nofolder", *TO_X, "--nope"], 2),
    "a bad value": (["convert", "{nano}", *TO_X, "--workers", "x"], 2),
    "a bad size": (["convert", "{nano}", *TO_X, "--memory-limit", "x"], 2),
    "an unknown device": (["convert", "{nano}", *TO_X, "--device", "tpu"], 2),
    "quantize": (["quantize", NOWHERE, *TO_X, "--scheme", "int4"], 3),
    "an unknown scheme": (["quantize", "{nano}", *TO_X, "--scheme", "nope"], 2),
    "verify": (["verify", NOWHERE], 3),
    "an unknown level": (["verify", "{nano}", "--level", "nope"], 2),
    "logits of nothing": (["verify", "{nano}", "--level", "logits"], 2),
    "compare": (["compare", NOWHERE, "--recipe", "int4"], 3),
    "compare by an unknown recipe": (["compare", "{nano}", "--recipe", "nope"], 2),
    "sensitivity": (["sensitivity", NOWHERE, *TO_X], 3),
    "recipes": (["recipes", "nope"], 2),
}
HEAVY = ("torch", "numba", "numpy", "huggingface_hub", "tokenizers", "multiprocessing")
LATE = tuple(
    f"qwen35_convert.{name}"
    for name in (
        "artifact",
        "calibration.executor",
        "comparison.measure",
        "execution",
        "fit.make",
        "run.items",
        "verification.verify",
    )
)


@pytest.fixture
def places(nano, tmp_path):
    """Return the folders that mistakes are about."""
    full, bad = tmp_path / "full", tmp_path / "bad"
    full.mkdir()
    bad.mkdir()
    (full / "notes.txt").write_text("mine")
    (bad / "config.json").write_text("{")
    return {"nano": nano, "full": full, "bad": bad}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_loads_nothing_that_computes_and_takes_less_than_a_second(mistake, places):
    """The processor's own time counts, best of three: the machine may be busy."""
    words, expected = MISTAKES[mistake]
    words = [word.format(**places) for word in words]
    code = (
        "import resource, sys\n"
        f"sys.argv = ['qwen35', *{words}]\n"
        "from qwen35_convert import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    code = done.code\n"
        f"loaded = set({HEAVY + LATE}) & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(code, used.ru_utime + used.ru_stime)\n"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        code_of, seconds = done.stdout.split()
        assert int(code_of) == expected, done.stderr
        if float(seconds) < 1.0:
            return
    pytest.fail(f"{seconds} s")
