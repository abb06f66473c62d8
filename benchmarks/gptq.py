"""Check and time GPTQ on a GPU: layers of the 35B-A3B and the 27B, weights in, stored parts out.

    python -m benchmarks.gptq [--model 35B-A3B] [--scheme nvfp4a16]

First a small weight is encoded on both sides: the error of its output on the GPU may be at most 2 %
above the CPU's, or nothing is timed and the exit code is 1. Then all weights of one layer, random
ones with Hessians of random inputs: seconds for the factors and for the codes. Experts are timed
on the first few and counted up. One JSON line for each is appended to results/gptq.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.convert import commit
from quant.fourbit.hessian import Factor, factor
from quant.registry import get_scheme
from quant.scheme import Scheme
from quant.stored import each_row

RESULTS = Path(__file__).parent / "results" / "gptq.jsonl"
TIMED_EXPERTS = 8
WORSE = 1.02


class Inputs(NamedTuple):
    """Weights that read the same inputs: their columns, the rows of each, how many such sets."""

    columns: int
    rows: tuple[int, ...]
    sets: int = 1


# A layer with the delta rule (they are three of four), and its MLP; as q, k, v are less, so is all.
LAYERS = {
    "35B-A3B": (
        Inputs(2048, (8192, 4096)), Inputs(4096, (2048,)), Inputs(2048, (512, 512)),
        Inputs(512, (2048,)), Inputs(2048, (512, 512), 256), Inputs(512, (2048,), 256),
    ),
    "27B": (
        Inputs(5120, (10240, 6144)), Inputs(6144, (5120,)), Inputs(5120, (17408, 17408)),
        Inputs(17408, (5120,)),
    ),
}  # fmt: skip


def main() -> int:
    """Check, then time the layers that were asked for; return 1 if the check fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=LAYERS, action="append", help="all if not given")
    parser.add_argument("--scheme", action="append", help="nvfp4a16 and int4 if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = False
    for name in options.scheme or ("nvfp4a16", "int4"):
        scheme = get_scheme(name)
        cpu, gpu = output_errors(scheme, options.device)
        passed = gpu <= WORSE * cpu
        failed |= not passed
        known = {"what": "gptq", "scheme": name, "error_cpu": cpu, "error_gpu": gpu}
        known |= {"passed": passed, "card": card(options.device)}
        known |= {"commit": options.commit or commit()}
        known |= {"versions": {"torch": metadata.version("torch")}}
        for model in (options.model or LAYERS) if passed else ():
            note(known | {"model": model} | time_layer(scheme, model, options.device), options)
        if not passed:
            print(json.dumps(known))
    return int(failed)


def note(line: dict[str, object], options: argparse.Namespace) -> None:
    print(json.dumps(line), flush=True)
    with options.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def problem(columns: int, device: str) -> Factor:
    """Return the factor of correlated inputs, twice as many as columns, some far larger."""
    generator = torch.Generator(device).manual_seed(columns)
    x = torch.randn(2 * columns, columns, generator=generator, device=device)
    x = (x + 0.5 * x.roll(1, 1)) * torch.randn(columns, generator=generator, device=device).exp()
    return factor(x.T @ x / len(x))


def weight(rows: int, columns: int, device: str) -> torch.Tensor:
    return (torch.randn(rows, columns, device=device) * 0.02).bfloat16()


def output_errors(scheme: Scheme, device: str) -> tuple[float, float]:
    """Return the relative error of a layer's output by the CPU's codes, and by the GPU's."""
    known = problem(1024, "cpu")
    w = weight(256, 1024, "cpu")
    prepared = scheme.prepare(iter([w]))
    errors = []
    there = Factor(*(x.to(device) for x in known_tensors(known)), known.added)
    for at, factors in ((w, known), (w.to(device), there)):
        parts = scheme.encode(at, prepared, factor=factors)
        missed = scheme.decode(each_row(scheme, parts, tuple(w.shape))) - w.float()
        loss, whole = (((x @ known.hessian) * x).sum() for x in (missed, w.float()))
        errors.append(float(loss / whole) ** 0.5)
    return errors[0], errors[1]


def known_tensors(known: Factor) -> tuple[torch.Tensor, ...]:
    return known.upper, known.order, known.diagonal, known.hessian


def time_layer(scheme: Scheme, model: str, device: str) -> dict[str, object]:
    """Return seconds of a layer's factors and of its codes, and the memory that they took."""
    seconds = {"factor_s": 0.0, "encode_s": 0.0}
    for inputs in LAYERS[model]:
        timed = min(inputs.sets, TIMED_EXPERTS)
        for _ in range(timed):
            for what, spent in time_inputs(scheme, inputs, device).items():
                seconds[what] += spent * inputs.sets / timed
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return seconds | {"layer_s": sum(seconds.values()), "peak_gb": peak}


def time_inputs(scheme: Scheme, inputs: Inputs, device: str) -> dict[str, float]:
    hessian = problem(inputs.columns, device).hessian
    weights = [weight(rows, inputs.columns, device) for rows in inputs.rows]
    prepared = scheme.prepare(iter(weights))
    start = now(device)
    known = factor(hessian)
    ready = now(device)
    for w in weights:
        scheme.encode(w, prepared, factor=known)
    return {"factor_s": ready - start, "encode_s": now(device) - ready}


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
