"""Inspect, plan and convert a slice of the largest models: seconds and peak memory of each command.

    python -m benchmarks.great_size [--shapes 397B-A17B 35B-A3B] [--workers 1 2 8] [--folder FOLDER]

The checkpoints are sparse: headers, index and config of the real ones, 94 shards of 807 GB, whose
data are holes of zeros (`benchmarks.sparse`). They are read like any other file. Of each shape
layer 0 is converted to FP8 and verified, once for each number of workers, with the default memory
limit.

What must hold, else exit code 1: inspecting and planning in under 20 s and 1 GB, conversions in
less than 600 MB. One JSON line for each command goes to benchmarks/results/great_size.jsonl; memory
is in 10^6 bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.convert import ENVIRONMENT, ROOT, commit, remove
from benchmarks.lines import record
from benchmarks.sparse import SHAPES, write_sparse

RESULTS = Path(__file__).parent / "results" / "great_size.jsonl"
PLAN_SECONDS, PLAN_MB, CONVERT_MB = 20.0, 1000.0, 600.0
SLICE = "layers.0.*"


def measure(*arguments: str) -> dict[str, Any]:
    """Run a command of ours; return its exit code, seconds and peak memory."""
    started = time.perf_counter()
    command = (sys.executable, "-m", "qwen35_convert.cli", *arguments)
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "wall_s": round(time.perf_counter() - started, 2),
        "core_s": round(usage.ru_utime + usage.ru_stime, 2),
        "rss_mb": round(usage.ru_maxrss * 1024 / 1e6, 1),
    }


def bench(folder: Path, name: str, workers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each command on one shape."""
    shape, source, out = SHAPES[name], folder / name, folder / f"{name}-out"
    infos = write_sparse(source, shape)
    nbytes = sum(info.nbytes for info in infos)
    assert (len(infos), nbytes) == (shape.tensors, shape.nbytes), "not the published sizes"
    about = {
        "what": "great size",
        "shape": name,
        "tensors": len(infos),
        "gb": round(nbytes / 1e9, 1),
        "shards": shape.shards,
    }
    planning = {"seconds": PLAN_SECONDS, "mb": PLAN_MB}
    yield about | _judged("inspect", measure("inspect", str(source)), planning)
    plan = measure("convert", str(source), "-o", str(out), "--plan")
    yield about | _judged("convert --plan", plan, planning)
    for count in workers:
        found = measure(
            "convert", str(source), "-o", str(out), "--only", SLICE, "--workers", str(count)
        )
        written = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        found |= {"workers": count, "written_gb": round(written / 1e9, 2)}
        remove(out)
        yield about | _judged(f"convert --only {SLICE}", found, {"mb": CONVERT_MB})


def _judged(command: str, found: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    held = (
        found["exit"] == 0
        and found["rss_mb"] < limits["mb"]
        and found["wall_s"] < limits.get("seconds", float("inf"))
    )
    return {"command": command, **found, "limits": limits, "held": held}


def about_here() -> dict[str, Any]:
    """Return the machine, the versions and the commit."""
    versions = {name: metadata.version(name) for name in ("torch", "numba", "safetensors")}
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def main() -> None:
    """Run the shapes asked for, append the results, and judge them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    held = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.shapes:
            for line in bench(Path(folder), name, options.workers):
                held = held and line["held"]
                record(RESULTS, line | about_here())
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
