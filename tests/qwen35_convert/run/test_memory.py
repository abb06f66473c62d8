"""`--memory-limit`: what a conversion takes at its peak, measured on child processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sparse import A3B, Shape, write_sparse
from qwen35_convert import api
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import Limit
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run import memory
from qwen35_convert.run.memory import Need, group_limits
from tests.checkpoints import hub_config, make_weights, moe, write_checkpoint
from tests.test_llama_cpp import KINDS, SIZES

ROOT = Path(__file__).parents[3]
NANO = ROOT / "tests" / "data" / "nano-dense"
MB = 10**6
# One layer of the 35B-A3B shape with fewer experts: 0.1 GB, read as zeros.
ONE_LAYER = Shape(
    A3B
    | {"num_hidden_layers": 1, "num_experts": 16, "vocab_size": 2048, "mtp_num_hidden_layers": 0}
)
# Loads and compiles once, then forks a child for each command: what it holds from before counts as
# its own.
FORK = """
import json, os, sys
from quant.ggml.scheme import Ggml
from quant.registry import get_scheme
from qwen35_convert import api, cli
from qwen35_convert.run.first_use import warm
for scheme in (get_scheme("fp8-block"), *map(Ggml, ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32"))):
    warm(scheme, verify=True)
for arguments in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        sys.argv = ["qwen35", *arguments]
        try:
            cli.main()
        except SystemExit as done:
            os._exit(done.code or 0)
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    print("::", os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


def peaks(*commands: list[str]) -> list[tuple[int, int]]:
    """Return the exit code and the peak memory in bytes of each command."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(commands)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (line.split() for line in done.stdout.splitlines() if line.startswith("::"))
    return [(int(code), int(peak)) for _, code, peak in lines]


RECIPES = {"m": "fp8-block", "m.gguf": "gguf-q4_k_m"}
WORKERS = (1, 8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, list[tuple[int, int]]]:
    """Exit codes and peaks: of both formats for each number of workers, and under two limits."""
    folder = tmp_path_factory.mktemp("sparse")
    write_sparse(folder / "in", ONE_LAYER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / "in")
    commands = [
        [
            "convert",
            str(folder / "in"),
            "-o",
            str(folder / f"{workers}-{out}"),
            "--recipe",
            recipe,
            "--workers",
            str(workers),
        ]
        for out, recipe in RECIPES.items()
        for workers in WORKERS
    ]
    limited = [
        "convert",
        str(folder / "in"),
        "-o",
        str(folder / "limited.gguf"),
        "--recipe",
        "gguf-q8_0",
        "--workers",
        "64",
        "--memory-limit",
    ]
    found = peaks(*commands, [*limited, "100MB"], [*limited, "510MB"])
    return {"m": found[:2], "m.gguf": found[2:4], "limits": found[4:]}


@pytest.mark.xdist_group("memory")  # measured once for all
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize("out", RECIPES)
@pytest.mark.all
def test_memory_stays_under_600_mb_at_any_number_of_workers(measured, out):
    assert [code for code, _ in measured[out]] == [0, 0]
    assert max(peak for _, peak in measured[out]) < 600 * MB


@pytest.mark.xdist_group("memory")
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.all
def test_a_limit_is_kept_by_64_workers_too_or_refused(measured):
    (refused, _), (kept, peak) = measured["limits"]
    assert refused == 2
    assert kept == 0
    assert peak <= 510 * MB


# A child's peak is never below what its parent holds as it starts it: this one holds little.
START = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print("::", os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


def convert_within(limit: str, source: Path, out: Path) -> tuple[int, int, str]:
    """Return exit code, peak memory and stderr of a calibrated conversion with two workers."""
    command = [sys.executable, "-m", "qwen35_convert.cli", "convert", str(source), "-o", str(out)]
    command += ["--recipe", "int4-gptq", "--workers", "2", "--memory-limit", limit]
    command += ["--set", "quantize.calibrate.tokens=2048"]
    done = subprocess.run(
        [sys.executable, "-c", START, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    code, peak = done.stdout.rpartition("::")[2].split()
    return int(code), int(peak), done.stderr


@pytest.mark.xdist_group("memory")
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.all
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_calibration_keeps_the_limit_or_the_least_that_it_asks_for(tmp_path, kind):
    source = NANO
    if kind == "moe":
        config = hub_config(moe=True, **SIZES, **KINDS["moe"])
        source = tmp_path / "in"
        write_checkpoint(source, config, make_weights(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(NANO / name, source / name)
    limit = 600
    code, peak, said = convert_within(f"{limit}MB", source, tmp_path / "out")
    if code:
        limit = int(re.search(r"(\d+) MB or more, as one layer", said)[1])
        limit += 16  # by which two runs differ
        code, peak, said = convert_within(f"{limit}MB", source, tmp_path / "out")
    assert code == 0, said
    assert peak <= limit * MB


def test_what_is_left_is_parted_among_workers_chunks_first():
    need = Need(base=400 * MB, least=1 * MB)
    spare = need.floor + 3 * (need.least + memory.OVERHEAD)
    assert need.part(need.floor, 8).workers == 1
    assert need.part(spare, 8).workers == 4
    assert need.part(spare, 1).workers == 1
    for limit in range(need.floor, need.floor + 500 * MB, 7 * MB):
        share = need.part(limit, 8)
        fixed = need.base + memory.MARGIN + memory.MAX_MAPPED
        assert fixed + share.workers * (share.chunk_bytes + memory.OVERHEAD) <= limit
        assert need.least <= share.chunk_bytes <= memory.CHUNK_BYTES


def test_a_limit_that_is_not_firm_gives_way(tmp_path):
    done = api.convert(
        moe(tmp_path / "in"),
        tmp_path / "out",
        options=api.RunOptions(memory_limit=Limit(1, firm=False)),
    )
    assert done.report is not None
    assert done.report.passed
    with pytest.raises(RecipeError, match=r"--memory-limit is 1 MB, expected \d+ MB or more"):
        api.convert(
            tmp_path / "in", tmp_path / "more", options=api.RunOptions(memory_limit=Limit(1))
        )
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_a_limit_that_is_not_firm_leaves_a_usual_chunk(tmp_path, monkeypatch):
    """A process that held much before, as a sweep does, does not write in crumbs."""
    monkeypatch.setattr(memory, "resident", lambda: 700 * MB)
    source = api.open_source(moe(tmp_path / "in"))[0]
    plan = api.plan(tmp_path / "in", "fp8-block", tmp_path / "out")
    share = memory.fit_memory(plan, source, Limit(600 * MB, firm=False), 1, verify=True)
    assert share.chunk_bytes == memory.CHUNK_BYTES


@pytest.mark.parametrize(
    ("out", "recipe"), [("m", "fp8-block"), ("m", "bf16-split"), ("m", "fp8-channel")]
)
def test_the_bytes_do_not_depend_on_the_chunks(tmp_path, monkeypatch, out, recipe):
    source = moe(tmp_path / "in")
    (tmp_path / "large").mkdir()
    (tmp_path / "small").mkdir()
    api.convert(source, tmp_path / "large" / out, read_recipe(recipe))
    monkeypatch.setattr(Need, "part", lambda *_: memory.Share(2, 1, 2))
    api.convert(source, tmp_path / "small" / out, read_recipe(recipe))
    for path in (tmp_path / "large" / out).iterdir():
        assert path.read_bytes() == (tmp_path / "small" / out / path.name).read_bytes()


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [
        ("0::/box/inner", "box", "memory.max"),
        ("4:memory:/box/inner", "memory/box", "memory.limit_in_bytes"),
        ("4:memory:/elsewhere", "memory", "memory.limit_in_bytes"),
    ],
)
def test_the_limits_of_control_groups_count_also_those_above(tmp_path, line, folder, file):
    own = tmp_path / "cgroup"
    own.write_text(f"3:cpu:/box\n{line}\n")
    place = tmp_path / "sys" / folder
    place.mkdir(parents=True)
    (place / file).write_text("1073741824\n")
    (tmp_path / "sys" / "memory.max").write_text("max\n")
    assert list(group_limits(tmp_path / "sys", own)) == [1 << 30]


def test_some_experts_of_a_stacked_tensor_are_refused(tmp_path):
    """The rest of the tensor would be zeros."""
    source = moe(tmp_path / "in", sizes="ragged")
    fused = ["experts=fused", "only='layers.0.mlp.experts.1.*'"]
    with pytest.raises(RecipeError, match="only names 2 of the 10 weights"):
        api.plan(source, read_recipe("bf16-split", fused))
    half = ["experts=fused", "only='layers.0.mlp.experts.*.gate_proj'"]
    with pytest.raises(RecipeError, match="only names 5 of the 10 weights"):
        api.plan(source, read_recipe("bf16-split", half))
    whole = ["experts=fused", "only='layers.0.mlp.experts.*'"]
    assert len(api.plan(source, read_recipe("bf16-split", whole)).tensors) == 2


def test_a_slice_of_a_gguf_file_is_written_without_verification_only(tmp_path, nano):
    recipe = read_recipe("gguf-q8_0", ["only='layers.0.*'"])
    with pytest.raises(RecipeError, match="add --no-verify"):
        api.convert(nano, tmp_path / "m.gguf", recipe)
    api.convert(nano, tmp_path / "m.gguf", recipe, options=api.RunOptions(verify=False))
    assert (tmp_path / "m.gguf").is_file()
