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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.errors import TritonError

from benchmarks.cases import elementwise, mixers, products
from benchmarks.cases.setting import MODELS, Case
from benchmarks.cases.verdict import verdict
from benchmarks.convert import commit
from benchmarks.lines import append
from runtime.capture import captured
from runtime.kernels.launch import interpreting

RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"
FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
# flops per byte above which the tensor cores, not memory, bound a Hopper GPU
BALANCE = 250
ALL = ("0.8B", "27B", "35B-A3B")
RAGGED = (1, 63, 0, 64, 65, 1000, 4099)
LONG = ((8192,), RAGGED, (130,), (1,))


@dataclass(frozen=True)
class Row:
    """A kernel, the models whose sizes it is run at, and its shapes."""

    kernel: str
    build: Callable[..., Case]
    models: tuple[str, ...]
    shapes: tuple[dict[str, Any], ...]
    tiny: dict[str, Any] | None


def over(name: str, values: Sequence[Any], **fixed: Any) -> tuple[dict[str, Any], ...]:
    """Return shapes that differ in one value."""
    return tuple({name: value, **fixed} for value in values)


def layers(scheme: str, rows: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Any:
    """Return shapes of linear layers with these rows and (outputs, inputs)."""
    return tuple({"m": m, "n": n, "k": k, "scheme": scheme} for n, k in sizes for m in rows)


BATCHES = (1, 8, 64)
TOKENS = (1, 64, 8192)
ROWS = (1, 4, 16, 17, 512, 4096)
WIDE, DOWN, SMALL, MOE_IN, ODD = (
    (34816, 5120),
    (5120, 17408),
    (7168, 1024),
    (12288, 2048),
    (1100, 1001),
)
STEPS = over("batch", BATCHES, state=torch.float32) + over("batch", (64,), state=torch.bfloat16)
CHUNKED = ({"lengths": (5000, 65, 1, 700), "starts": (64, 4096, 8000, 0)},)
PREFILLS = ({"lengths": (8192,), "starts": (0,)}, {"lengths": RAGGED, "starts": (0,) * 7}, *CHUNKED)
DECODES = over("lengths", ((1,), (1000,), (4096,), (8192,), (4096,) * 8, (7, 1, 64, 1000) * 16))
TINY_LENGTHS = {"lengths": (3, 0, 20, 66)}
TABLE = (
    Row("conv1d_prefill", elementwise.conv1d_prefill, ALL, over("lengths", LONG), TINY_LENGTHS),
    Row("conv1d_step", elementwise.conv1d_step, ALL, over("batch", BATCHES), {"batch": 3}),
    Row("rmsnorm", elementwise.rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("add_rmsnorm", elementwise.add_rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("gated_rmsnorm", elementwise.gated_rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("rope_cos_sin", elementwise.rope_cos_sin, ("0.8B",), over("tokens", TOKENS), {"tokens": 3}),
    Row("norm_rope_write", elementwise.norm_rope_write, ALL, over("tokens", TOKENS), {"tokens": 9}),
    Row("silu_mul", elementwise.silu_mul, ALL, over("tokens", (16, 4096)), {"tokens": 3}),
    Row("quantize_rows", elementwise.quantise_rows, ALL,
        over("tokens", (17, 4096), group=128) + over("tokens", (17, 4096), group=None), None),
    Row("gated_delta_step", mixers.gated_delta_step, ALL, STEPS,
        {"batch": 3, "state": torch.float32}),
    Row("gated_delta_prefill", mixers.gated_delta_prefill, ALL,
        (*over("lengths", (*LONG, (2048,) * 4)), {"lengths": (700,), "equal_keys": True}),
        TINY_LENGTHS),
    Row("attention_prefill", mixers.prefill, ALL, PREFILLS,
        {"lengths": (1, 70, 20), "starts": (40, 65, 0)}),
    Row("attention_decode", mixers.decode, ALL, DECODES, {"lengths": (100, 1, 65)}),
    Row("attention_step", mixers.step, ALL, DECODES[:-1], {"lengths": (100, 1, 65)}),
    Row("dequant", products.dequant, ("27B",),
        ({"n": 34816, "k": 5120, "scheme": "block"}, {"n": 1100, "k": 1001, "scheme": "channel"}),
        {"n": 130, "k": 140, "scheme": "block"}),
    Row("linear_fp8_block", products.linear_fp8, ("27B",), layers("block", ROWS, (WIDE, DOWN)),
        {"m": 5, "n": 70, "k": 140, "scheme": "block"}),
    Row("linear_fp8_block", products.linear_fp8, ("0.8B",), layers("block", ROWS, (SMALL,)), None),
    Row("linear_fp8_block", products.linear_fp8, ("35B-A3B",),
        layers("block", ROWS, (MOE_IN,)), None),
    Row("linear_fp8_odd", products.linear_fp8, ("0.8B",),
        layers("block", (3, 5, 33), (ODD,)) + layers("channel", (3, 5, 33), (ODD,)), None),
    Row("linear_fp8_channel", products.linear_fp8, ("27B",), layers("channel", ROWS, (WIDE,)),
        {"m": 5, "n": 70, "k": 140, "scheme": "channel"}),
    Row("linear_fp8_dynamic_block", products.linear_fp8_dynamic, ("27B",),
        layers("block", ROWS[3:], (WIDE, DOWN)), None),
    Row("linear_fp8_dynamic_block", products.linear_fp8_dynamic, ("0.8B",),
        layers("block", ROWS[3:], (SMALL,)), None),
    Row("linear_fp8_dynamic_channel", products.linear_fp8_dynamic, ("27B",),
        layers("channel", ROWS[3:], (WIDE,)), None),
    Row("gated_linear", products.gated_linear, ("0.8B", "27B"),
        over("tokens", (1, 4), scheme="block") + over("tokens", (1, 4), scheme="plain"),
        {"tokens": 3, "scheme": "block"}),
    Row("route", products.route, ("35B-A3B",),
        over("tokens", TOKENS, absorbed=False) + over("tokens", (64,), absorbed=True),
        {"tokens": 3, "absorbed": True}),
    Row("expert_blocks", products.sort_pairs, ("35B-A3B",),
        over("tokens", (64, 8192), block=128), {"tokens": 70, "block": 16}),
    Row("add_pairs_rmsnorm", products.add_pairs_norm, ("35B-A3B",),
        over("tokens", (64, 8192)), {"tokens": 3}),
    Row("moe_experts_bf16", products.moe_experts, ("35B-A3B",),
        over("tokens", (1, 4, 64, 2048), scheme="plain"), {"tokens": 9, "scheme": "plain"}),
    Row("moe_experts_fp8", products.moe_experts, ("35B-A3B",),
        over("tokens", (1, 4, 64, 2048), scheme="block"), {"tokens": 2, "scheme": "block"}),
    Row("moe_experts_fp8_dynamic", products.moe_experts, ("35B-A3B",),
        over("tokens", (64, 2048, 8192), scheme="block", dynamic=True), None),
)  # fmt: skip


def timed(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the median milliseconds of a call, from a CUDA graph if it can be captured."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return {"ms": (time.perf_counter() - started) * 1e3, "timed": "interpreter"}
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        graph, _ = captured(call)
    except RuntimeError:
        return {"ms": eager(call), "timed": "eager"}
    return {"ms": eager(graph.replay), "timed": "graph"}


def eager(call: Callable[[], Any], repeat: int = 30) -> float:
    """Return the median milliseconds of calls on the device, each with a cold L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def speed(case: Case, ms: float, bandwidth: float) -> dict[str, float]:
    """Return how the time compares with what bounds it."""
    if case.flops / case.bytes > BALANCE:
        return {"tflops": case.flops / ms / 1e9}
    return {"fraction_of_copy_bandwidth": case.bytes / ms / 1e6 / bandwidth}


def copy_bandwidth(device: str) -> float:
    """Return the gigabytes a second, read and written, of a copy within the device."""
    if device == "cpu":
        return 1.0
    source, target = (torch.empty(COPY_BYTES, dtype=torch.int8, device=device) for _ in range(2))
    source.random_()
    return 2 * COPY_BYTES / eager(lambda: target.copy_(source)) / 1e6


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
    said = [f"{line['kernel']:26}", f"{line['model']:8}", f"{shape:28}"]
    if "error" in line:
        said.append(f"ERROR {line['error'][:300]}")
    else:
        said += [f"{line['worst']:9}", f"rms {line['relative_rms']:.1e} max {line['max_abs']:.1e}"]
        said.append("ok  " if line["passed"] else f"FAIL {line['failed']} ({line['tolerance']})")
    if "ms" in line:
        said.append(f"{line['ms'] * 1e3:9.1f} us")
        said += [
            f"{name[:8]} {line[name]:.3g}"
            for name in ("tflops", "fraction_of_copy_bandwidth")
            if name in line
        ]
        said += [line["timed"]] * (line["timed"] != "graph")
    print(" ".join(said), flush=True)


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
