"""Check every kernel of the runtime on a CUDA device, then time it.

    python -m benchmarks.kernels [--only KERNEL ...] [--check-only] [--jobs 12]

Each output is compared with a float64 reference (`benchmarks/cases`), on fresh random inputs, with
new tensors poisoned and pools compared wholly. What fails is reported, not timed, and the exit code
is 1. What passes is timed: the median of replays of a CUDA graph, the L2 cache overwritten before
each, as the weights of a layer find it. One JSON line for each kernel and shape is appended to
benchmarks/results/kernels.jsonl:

    max_abs, relative_rms, tolerance    of the output `worst`, the nearest to its tolerance
    fraction_of_copy_bandwidth          least bytes / ms over what a device copy reaches
    tflops                              instead, where arithmetic is the limit

--jobs fills Triton's cache from that many processes first: compiling takes most of the time.
`--device cpu` runs tiny shapes in Triton's interpreter, to test this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.errors import TritonError

from benchmarks.cases.setting import MODELS, Case
from benchmarks.cases.verdict import verdict
from benchmarks.convert import commit
from benchmarks.device_time import copy_bandwidth, timed
from benchmarks.kernel_table import TABLE, Row
from benchmarks.lines import append
from runtime.kernels.launch import interpreting

RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"
# flops per byte above which the tensor cores, not memory, bound a Hopper GPU
BALANCE = 250


def speed(case: Case, ms: float, bandwidth: float) -> dict[str, float]:
    """Return how the time compares with what bounds it."""
    if case.flops / case.bytes > BALANCE:
        return {"tflops": case.flops / ms / 1e9}
    return {"fraction_of_copy_bandwidth": case.bytes / ms / 1e6 / bandwidth}


def measure(row: Row, model: str, shape: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return one line: what the check says, and the time if it passed."""
    setting = MODELS[model]
    line: dict[str, Any] = {
        "what": "kernel",
        "kernel": row.kernel,
        "model": model,
        "shape": {name: str(x) if isinstance(x, torch.dtype) else x for name, x in shape.items()},
        "dtype": str(setting.dtype).removeprefix("torch."),
    }
    try:
        case = row.build(setting, **shape)
        line |= verdict(case.check())
        if line["passed"] and not options.check_only:
            line |= timed(case.call, setting.device) | {"bytes": case.bytes}
            line |= speed(case, line["ms"], options.bandwidth)
    except (RuntimeError, TritonError) as error:
        line |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:600]}
    return line


def about(bandwidth: float, device: str) -> dict[str, Any]:
    """Return what every line says of the machine and the code."""
    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else "interpreter",
        "copy_gb_per_s": round(bandwidth, 1),
        "versions": {name: metadata.version(name) for name in ("torch", "triton")},
    }


def show(line: dict[str, Any]) -> None:
    """Print a line of the table."""
    shape = ",".join(str(x) for x in line["shape"].values()).replace(" ", "")
    if len(shape) > 28:
        shape = shape[:25] + "..."
    words = [f"{line['kernel']:26}", f"{line['model']:8}", f"{shape:28}"]
    if "error" in line:
        words.append(f"ERROR {line['error'][:300]}")
    else:
        words += [f"{line['worst']:9}", f"rms {line['relative_rms']:.1e} max {line['max_abs']:.1e}"]
        words.append("ok  " if line["passed"] else f"FAIL {line['failed']} ({line['tolerance']})")
    if "ms" in line:
        words.append(f"{line['ms'] * 1e3:9.1f} us")
        words += [
            f"{name[:8]} {line[name]:.3g}"
            for name in ("tflops", "fraction_of_copy_bandwidth")
            if name in line
        ]
        words += [line["timed"]] * (line["timed"] != "graph")
    print(" ".join(words), flush=True)


def compile_ahead(kernels: Sequence[str], jobs: int) -> None:
    """Compile in other processes; what they find is found again, alone on the device."""

    def one(kernel: str) -> None:
        command = [sys.executable, "-m", "benchmarks.kernels", "--check-only", "--only", kernel]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, reversed(kernels)))  # the products, which come last, take longest


def rows(options: Any) -> list[tuple[Row, str, dict[str, Any]]]:
    """Return what to run."""
    wanted = [row for row in TABLE if not options.only or row.kernel in options.only]
    if options.device == "cpu":
        return [(row, "tiny", row.tiny) for row in wanted if row.tiny is not None]
    return [(row, model, shape) for row in wanted for model in row.models for shape in row.shapes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 1 if a check failed."""
    names = list(dict.fromkeys(row.kernel for row in TABLE))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="KERNEL")
    parser.add_argument("--check-only", action="store_true", help="time and record nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args(arguments)
    if options.jobs:
        compile_ahead(options.only or names, options.jobs)
    torch.manual_seed(options.seed)
    options.bandwidth = 0.0 if options.check_only else copy_bandwidth(options.device)
    told = about(options.bandwidth, options.device) | {"commit": options.commit or commit()}
    print(json.dumps(told | {"seed": options.seed}))
    failed = 0
    with interpreting() if options.device == "cpu" else nullcontext():
        for row, model, shape in rows(options):
            line = measure(row, model, shape, options)
            failed += not line["passed"]
            show(line)
            if options.device == "cuda" and not options.check_only:
                append(RESULTS, line | told)
    print(f"{failed} failed" if failed else "all passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
