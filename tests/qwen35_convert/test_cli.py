"""The command line: help, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qwen35_convert.recipe.files import bundled_recipes, headline
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.recipe.rows import recipe_row
from tests.checkpoints import dense, moe
from tests.qwen35_convert.command import ROOT, called, qwen35

COMMANDS = (
    "inspect",
    "download",
    "convert",
    "quantize",
    "verify",
    "compare",
    "imatrix",
    "sensitivity",
    "bench",
    "run",
    "recipes",
    "upload",
)


def test_help_needs_no_torch():
    code = (
        "import sys\n"
        "sys.argv = ['qwen35', '--help']\n"
        "from qwen35_convert import cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numba', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


LATE = (
    "torch",
    "numba",
    "numpy",
    "huggingface_hub",
    "gguf",
    "tokenizers",
    "jinja2",
    "tqdm",
    "multiprocessing",
    "qwen35_convert.api",
    "qwen35_convert.artifact",
    "qwen35_convert.calibration",
    "qwen35_convert.measuring",
    "qwen35_convert.run.items",
)


def test_inspect_loads_nothing_that_computes_or_converts(nano):
    """What it needs not takes longer to load than its work; modules are counted, not seconds."""
    code = (
        "import sys\n"
        f"sys.argv = ['qwen35', 'inspect', {str(nano)!r}]\n"
        "from qwen35_convert import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    assert not done.code\n"
        f"sys.exit(', '.join(set({LATE}) & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "nano-dense" in done.stdout
    assert done.returncode == 0, done.stderr


def test_structure_is_verified_without_loading_torch(nano, tmp_path):
    """Headers and side files are compared with the source's; no weight is read."""
    assert called("convert", nano, "-o", tmp_path / "out", "--no-verify").returncode == 0
    arguments = ["verify", str(tmp_path / "out"), "--against", str(nano), "--level", "structure"]
    code = (
        "import sys\n"
        f"sys.argv = ['qwen35', *{arguments}]\n"
        "from qwen35_convert import cli\n"
        "cli.app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_answers_at_once():
    """0.5 s is the promise; the processor's own time, best of three: the machine may be busy."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert qwen35("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.5 for _ in range(3))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help(golden, command):
    done = called(command, "--help")
    assert done.returncode == 0
    assert "Example: qwen35" in done.stdout
    golden(f"help-{command}.txt", done.stdout)


def test_no_line_of_the_list_of_commands_is_cut():
    listed = called("--help").stdout.partition("Commands:")[2]
    assert "sensitivity" in listed
    assert "..." not in listed


def test_every_command_and_recipe_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"qwen35 {command}" in readme, command
    for recipe in bundled_recipes():
        assert f"`{recipe}`" in readme, recipe


def test_convert_prints_results_on_stdout_and_notes_on_stderr(tmp_path):
    source = dense(tmp_path / "in")
    done = called("convert", source, "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verify"]["passed"] is True
    assert found["receipt"]["recipe"]["name"] == "fp8-block"


def test_verify_fails_with_exit_1_and_the_artifact_stays(tmp_path):
    source, other = dense(tmp_path / "in"), tmp_path / "other"
    dense(other, intermediate_size=256)
    called("convert", source, "-o", tmp_path / "out", "--no-verify")
    done = called("verify", tmp_path / "out", "--against", other, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["failures"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["convert", "SOURCE"], 2, "--out"),
        (["convert", "SOURCE", "-o", "OUT", "--recipe", "fp8-blok"], 2, "did you mean 'fp8-block'"),
        (
            ["convert", "SOURCE", "-o", "OUT", "--set", "quantize.skale=pow2"],
            2,
            "did you mean 'scale'",
        ),
        (["quantize", "SOURCE", "-o", "OUT", "--scheme", "fp8"], 2, "fp8-block"),
        (["convert", "nowhere/at/all", "-o", "OUT"], 3, "does not exist"),
        (["convert", "SOURCE", "-o", "SOURCE"], 4, "contain each other"),
        (["convert", "SOURCE", "-o", "OUT", "--device", "cuda"], 5, "no CUDA GPU found"),
        (["verify", "nowhere"], 3, "does not exist"),
        (["inspect", "nowhere"], 3, "does not exist"),
        (["plam"], 2, "No such command"),
    ],
)
def test_errors_are_one_block_with_the_exit_code_of_their_kind(
    tmp_path, monkeypatch, arguments, code, said
):
    import torch

    if code == 5 and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    source = dense(tmp_path / "SOURCE")
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "OUT")}
    monkeypatch.chdir(tmp_path)
    done = called(*[places.get(a, a) for a in arguments])
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SOURCE"]


def test_ctrl_c_exits_130_and_the_same_command_goes_on(tmp_path):
    source = moe(tmp_path / "in")
    code = (
        "import qwen35_convert.run.items as run, sys, time\n"
        "run.JOURNAL_SECONDS = 0.0\n"
        "inner = run.convert_item\n"
        "def slow(*args):\n    time.sleep(0.02)\n    return inner(*args)\n"
        "run.convert_item = slow\n"
        "from qwen35_convert import cli\n"
        f"sys.argv = ['qwen35', 'convert', {str(source)!r}, '-o', {str(tmp_path / 'out')!r},"
        " '--workers', '1', '--no-verify']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / ".out.qwen35-partial" / "journal"
    while process.poll() is None and rows_done(journal) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert rows_done(journal) >= 3
    done = called("convert", source, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def rows_done(journal: Path) -> int:
    return len(journal.read_text().splitlines()) - 1 if journal.exists() else 0


def test_a_plan_is_printed_and_nothing_is_written(tmp_path, golden):
    for name, source in (("dense", dense(tmp_path / "dense")), ("moe", moe(tmp_path / "moe"))):
        done = called("convert", source, "-o", tmp_path / "out", "--plan")
        assert done.returncode == 0, done.stderr
        golden(f"plan-{name}.txt", done.stdout)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "moe"]


def test_a_plan_as_json_lists_every_row(tmp_path):
    done = called("convert", dense(tmp_path / "in"), "-o", tmp_path / "out", "--plan", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert len({row["name"] for row in rows}) == len(rows) > 50


def test_inspect_says_what_a_checkpoint_is(nano):
    done = called("inspect", nano, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"] == "hub"
    assert found["kind"] == "dense"
    assert found["tensors"] == 91
    assert found["config"]["linear_num_value_heads"] == 2
    assert found["mtp"]["layers"] == 1
    assert found["vision"] is True
    assert found["problems"] == []
    assert found["dtypes"] == {"BF16": 85, "F32": 6}
    assert "tensor_list" not in found
    listed = json.loads(called("inspect", nano, "--json", "--tensors").stdout)["tensor_list"]
    assert len(listed) == 91


def test_inspect_lists_problems_with_their_remedy(tmp_path):
    from safetensors.torch import load_file, save_file

    source = dense(tmp_path / "in")
    weights = load_file(source / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    found = json.loads(called("inspect", source, "--json").stdout)
    (problem,) = found["problems"]
    assert problem["tensor"] == "lm_head.weight"
    assert problem["remedy"]


def test_recipes_are_listed_and_printed():
    listed = called("recipes").stdout
    for name in bundled_recipes():
        assert name in listed
    assert "scheme: fp8-block" in called("recipes", "fp8-block").stdout


@pytest.mark.parametrize("name", bundled_recipes())
def test_the_table_of_recipes_says_size_and_error_of_each(name):
    row = recipe_row(name)
    assert row["use"] == headline(name)
    assert row["use"].endswith("."), "the first line is a sentence: `recipes` prints no more"
    assert row["scheme"] == read_recipe(name).quantize.scheme
    assert re.match(r"\d|that of|35B", row["size"])
    assert re.match(r"(Weight error|KL[^:]*): \S", row["error"])


def test_recipes_are_a_table_in_json_and_each_is_resolved():
    rows = json.loads(called("recipes", "--json").stdout)["recipes"]
    assert [row["name"] for row in rows] == bundled_recipes()
    one = json.loads(called("recipes", "int4", "--json").stdout)["recipe"]
    assert one == read_recipe("int4").model_dump(mode="json")


def test_the_version_names_what_numbers_depend_on_and_loads_none_of_it():
    code = (
        "import sys\n"
        "sys.argv = ['qwen35', '--version']\n"
        "from qwen35_convert import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    assert not done.code\n"
        "assert not {'torch', 'triton', 'numba'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installed = metadata.version("torch")
    assert re.fullmatch(
        rf"qwen35 \S+ \(Python 3\.\S+, torch {re.escape(installed)}, triton [^,]+, numba [^,]+\)\n",
        done.stdout,
    )


def test_h_is_help_of_every_command():
    for command in COMMANDS:
        assert called(command, "-h").stdout == called(command, "--help").stdout


def unread(*arguments: object) -> tuple[int, str]:
    """Return exit code and stderr of a command whose stdout nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "qwen35_convert", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["recipes"], ["recipes", "fp8-block"], ["convert", "-h"]])
def test_a_reader_that_leaves_is_no_failure(arguments):
    assert unread(*arguments) == (0, "")


def test_a_reader_that_leaves_does_not_pass_what_failed(tmp_path, nano):
    """`qwen35 verify ... | head -1` keeps its exit code."""
    source = dense(tmp_path / "in")
    assert called("convert", source, "-o", tmp_path / "out", "--no-verify").returncode == 0
    arguments = ["verify", tmp_path / "out", "--against", nano, "--level", "structure", "-q"]
    assert unread(*arguments) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_changes_no_exit_code(nano_path, tmp_path, closed):
    """A service may start a command so; no file of an artifact gets the number of a stream."""
    command = f"{shlex.quote(sys.executable)} -m qwen35_convert"
    recipe = "--recipe bf16-split"
    words = f"convert {shlex.quote(str(nano_path))} -o {shlex.quote(str(tmp_path / 'out'))}"
    assert _in_a_shell(f"{command} {words} {recipe} {closed}") == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert _in_a_shell(f"{command} inspect {shlex.quote(str(tmp_path / 'none'))} {closed}") == 3


def _in_a_shell(line: str) -> int:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(["sh", "-c", line], env=environment, check=False).returncode


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["inspect", "NANO", "--json"], 4, "standard output cannot be written: No space left on"),
        (["recipes", "fp8-blok"], 2, "did you mean"),
    ],
)
def test_output_on_a_full_disk_is_one_block_and_not_exit_0(nano, arguments, code, said):
    command = [sys.executable, "-m", "qwen35_convert", *arguments]
    command = [str(nano) if word == "NANO" else word for word in command]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def completed(line: str) -> list[str]:
    """Return what bash is offered for the last word of a line."""
    words = line.split(" ")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "_QWEN35_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-m", "qwen35_convert"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("qwen35 ver", ["verify"]),
        ("qwen35 convert x --recipe fp8-block-g", ["fp8-block-gdn"]),
        ("qwen35 recipes bf", ["bf16-split"]),
        ("qwen35 verify x --level ", ["structure", "tensors", "logits"]),
        ("qwen35 quantize x --scheme fp8", ["fp8-block", "fp8-channel"]),
        ("qwen35 convert x --device ", ["cpu", "cuda"]),
        ("qwen35 convert x --executor r", ["ray"]),
        ("qwen35 verify x --output-format ", ["text", "json", "github"]),
    ],
)
def test_a_shell_completes_values(line, offered):
    assert completed(line) == offered


def test_quiet_leaves_stderr_empty_and_results_on_stdout(tmp_path):
    source = moe(tmp_path / "in")
    loud = called("convert", source, "-o", tmp_path / "loud", "--recipe", "int4-g32")
    assert "note: " in loud.stderr
    quiet = called("convert", source, "-o", tmp_path / "quiet", "--recipe", "int4-g32", "-q")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert quiet.stdout == loud.stdout.replace("loud:", "quiet:")


def test_the_summary_of_a_gguf_names_its_vision_file(tmp_path, nano):
    out = tmp_path / "new" / "m.gguf"
    arguments = ["--recipe", "gguf-bf16", "--set", "vision=keep", "--no-verify", "-q"]
    first, second = called("convert", nano, "-o", out, *arguments).stdout.splitlines()
    assert first.startswith(f"{out}: ")
    assert re.fullmatch(
        rf"{out.parent}/mmproj-m\.gguf: \d+ of these tensors, \S+ .B: vision, for --mmproj", second
    )


def test_the_summary_says_of_how_many_weights_some_became_zero(tmp_path, nano):
    out = tmp_path / "out"
    line = called("convert", nano, "-o", out, "-q").stdout.splitlines()[2]
    assert line.startswith("fp8-block ")
    zeros, weights, share = re.search(
        r"rounded to zero: (\S+) of (\S+) \((\S+) ?%\)", line
    ).groups()
    assert round(100 * int(zeros) / int(weights.replace(",", "")), 2) == float(share)
    stored = load_file(out / "model.safetensors")
    codes = [w for w in stored.values() if w.dtype == torch.float8_e4m3fn]
    assert sum(w.numel() for w in codes) == int(weights.replace(",", ""))


@pytest.mark.parametrize(
    ("out", "message", "code"),
    [
        ("model", "contain each other", 4),
        ("model/below", "contain each other", 4),
        ("model.gguf", "is a file of the source", 4),
        ("file/below", "is a file", 4),
    ],
)
def test_a_plan_that_could_not_be_written_is_refused(nano, tmp_path, out, message, code):
    source = tmp_path / "model"
    shutil.copytree(nano, source)
    (tmp_path / "file").write_text("mine")
    if out.endswith(".gguf"):
        done = called("convert", source, "-o", tmp_path / out, "--no-verify", "-q")
        assert done.returncode == 0, done.stderr
        source = tmp_path / out
    before = sorted(tmp_path.iterdir())
    done = called("convert", source, "-o", tmp_path / out, "--plan")
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("more", [["--plan"], ["--overwrite"], ["--recipe", "fp8-block"]])
@pytest.mark.parametrize("name", ["empty.gguf", "full.GGUF"])
def test_a_folder_that_is_named_as_a_file_stays_as_it_is(nano, tmp_path, name, more):
    (tmp_path / "empty.gguf").mkdir()
    shutil.copytree(nano, tmp_path / "full.GGUF")
    before = sorted(tmp_path.rglob("*"))
    done = called("convert", nano, "-o", tmp_path / name, *more)
    assert (done.returncode, done.stdout) == (4, "")
    assert f"{name} is a folder, named as a GGUF file" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("more", [["--plan"], []])
def test_a_memory_limit_of_nothing_is_misuse(nano, tmp_path, more):
    done = called("convert", nano, "-o", tmp_path / "out", "--memory-limit", "0", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--memory-limit is 0, expected a size above 0" in done.stderr
    assert list(tmp_path.iterdir()) == []
