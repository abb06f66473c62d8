"""Check and time GPTQ on a GPU: layers of the 35B-A3B and the 27B, weights in, stored parts out.

    python -m benchmarks.gptq [--model 35B-A3B] [--scheme nvfp4a16]

First small weights are encoded on both sides: the error of their outputs on the GPU may be at most
2 % above the CPU's, or nothing is timed and the exit code is 1. Then all weights of one layer, with
all experts: random ones, with Hessians of random inputs. Seconds:

    prepare_s  what a scheme must know of whole matrices, on one core
    factor_s   the factors of the Hessians
    encode_s   weights from the CPU's memory to stored parts there
    parts_s    of the columns of one batch of the widest input, once: GPTQ, a pass after it, and of
               each what is not products

One JSON line for each is appended to results/gptq.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.convert import commit
from benchmarks.lines import append
from quant.fourbit import batched
from quant.fourbit.batched import Blocks, Factors, encode_together
from quant.fourbit.hessian import Factor, factor
from quant.fourbit.rows import Rows
from quant.registry import get_scheme
from quant.scheme import Scheme
from quant.stored import each_row
from qwen35_convert.calibration.memory import matrices_at_once
from runtime.kernels.gptq import BLOCKS

RESULTS = Path(__file__).parent / "results" / "gptq.jsonl"
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
    "tiny": (Inputs(256, (48, 24)), Inputs(128, (32,), 5)),
}  # fmt: skip


def main() -> int:
    """Check, then time the layers that were asked for; return 1 if anything fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=LAYERS, action="append", help="both if not given")
    parser.add_argument("--scheme", action="append", help="nvfp4a16 and int4 if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = False
    for name in options.scheme or ("nvfp4a16", "int4"):
        known = {"what": "gptq", "scheme": name, "card": card(options.device)}
        known |= {"commit": options.commit or commit()}
        known |= {"versions": {"torch": metadata.version("torch")}}
        passed = attempt(known, lambda name=name: check(get_scheme(name), options.device))
        for model in (options.model or ("35B-A3B", "27B")) if passed else ():
            line = attempt(
                known | {"model": model},
                lambda name=name, model=model: time_layer(get_scheme(name), model, options.device),
            )
            failed |= line is None
            if line is not None:
                append(options.results, line | passed)
        failed |= passed is None
    return int(failed)


def attempt(
    known: dict[str, object], measure: Callable[[], dict[str, object]]
) -> dict[str, object] | None:
    """Return and print what is known with what is measured; None if that fails, which is said."""
    start = time.perf_counter()
    try:
        line = known | measure()
    except Exception:  # noqa: BLE001 - the other parts are still measured
        traceback.print_exc()
        return None
    print(json.dumps(line), f"({time.perf_counter() - start:.1f} s in all)", flush=True)
    return line


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def hessian(columns: int, device: str, seed: int = 0) -> torch.Tensor:
    """Return the Hessian of correlated inputs, twice as many as columns, some far larger."""
    generator = torch.Generator(device).manual_seed(columns + seed)
    x = torch.randn(2 * columns, columns, generator=generator, device=device)
    x = (x + 0.5 * x.roll(1, 1)) * torch.randn(columns, generator=generator, device=device).exp()
    return x.T @ x / len(x)


def weight(rows: int, columns: int, device: str) -> torch.Tensor:
    return (torch.randn(rows, columns, device=device) * 0.02).bfloat16().cpu()


def check(scheme: Scheme, device: str) -> dict[str, object]:
    """Return the relative errors of outputs by the CPU's codes, and by the GPU's.

    AssertionError if the GPU's are more than a little larger.
    """
    hessians = [hessian(1024, "cpu", seed) for seed in range(2)]
    weights = [weight(256, 1024, "cpu") for _ in hessians]
    prepared = [scheme.prepare(iter([w])) for w in weights]
    factors = [factor(x.clone()) for x in hessians]
    there = Factors.of([moved(x, device) for x in factors], BLOCKS)
    on_cpu = [
        scheme.encode(*each, None, None, known)
        for *each, known in zip(weights, prepared, factors, strict=True)
    ]
    on_gpu = encode_together(scheme, torch.stack(weights).to(device), prepared, there)
    errors = [output_error(scheme, parts, weights, hessians) for parts in (on_cpu, list(on_gpu))]
    assert errors[1] <= WORSE * errors[0], f"errors of the CPU and of the GPU: {errors}"
    return {"error_cpu": errors[0], "error_gpu": errors[1], "passed": True}


def output_error(
    scheme: Scheme,
    encoded: list[dict[str, torch.Tensor]],
    weights: list[torch.Tensor],
    hessians: list[torch.Tensor],
) -> float:
    lost = whole = 0.0
    for parts, w, h in zip(encoded, weights, hessians, strict=True):
        missed = scheme.decode(each_row(scheme, parts, tuple(w.shape))) - w.float()
        lost += float(((missed @ h) * missed).sum())
        whole += float(((w.float() @ h) * w.float()).sum())
    return (lost / whole) ** 0.5


def moved(known: Factor, device: str) -> Factor:
    tensors = known.upper, known.order, known.diagonal, known.hessian
    return Factor(*(x.to(device) for x in tensors), known.added)


def time_layer(scheme: Scheme, model: str, device: str) -> dict[str, object]:
    """Return seconds of a layer's factors and of its codes, and the memory that they took."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    warm(scheme, model, device)
    seconds = {"prepare_s": 0.0, "factor_s": 0.0, "encode_s": 0.0}
    for inputs in LAYERS[model]:
        left, most = inputs.sets, matrices_at_once(max(inputs.rows), inputs.columns)
        before = sum(seconds.values())
        while left > 0:
            for what, spent in time_batch(scheme, inputs, min(left, most), device).items():
                seconds[what] += spent
            left -= most
        print(f"  {inputs}: {sum(seconds.values()) - before:.3f} s", flush=True)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    parts = parts_of(scheme, max(LAYERS[model], key=lambda x: x.sets * x.columns), device)
    return seconds | {"layer_s": sum(seconds.values()), "peak_gb": peak, "parts_s": parts}


def warm(scheme: Scheme, model: str, device: str) -> None:
    """Compile what a layer needs: a kernel may be one of its own for a number of columns."""
    for columns in {inputs.columns for inputs in LAYERS[model]}:
        time_batch(scheme, Inputs(columns, (16,)), 1, device)


def time_batch(scheme: Scheme, inputs: Inputs, count: int, device: str) -> dict[str, float]:
    """Return seconds of the weights of so many sets of inputs, encoded together."""
    hessians = [hessian(inputs.columns, device, seed) for seed in range(count)]
    weights = [[weight(n, inputs.columns, device) for n in inputs.rows] for _ in hessians]
    times = [now(device)]
    prepared = [scheme.prepare(iter(each)) for each in weights]
    times.append(now(device))
    known = Factors.of([factor(x) for x in hessians], BLOCKS)
    times.append(now(device))
    for each in zip(*weights, strict=True):
        w_ENK = torch.stack(each).to(device)
        for _ in encode_together(scheme, w_ENK, prepared, known):
            pass
    times.append(now(device))
    spent = (after - before for before, after in pairwise(times))
    return dict(zip(("prepare_s", "factor_s", "encode_s"), spent, strict=True))


def parts_of(scheme: Scheme, inputs: Inputs, device: str) -> dict[str, float]:
    """Return seconds of the parts of one batch of the first weights of an input."""
    rows, columns = inputs.rows[0], inputs.columns
    count = min(inputs.sets, matrices_at_once(rows, columns))
    known = Factors.of([factor(hessian(columns, device)) for _ in range(count)], BLOCKS)
    only = replace(known, blocks=Blocks(nothing, nothing))
    size = getattr(scheme, "size", lambda _: getattr(scheme, "group", columns))(columns)
    w = torch.randn(count, rows, columns, device=device) * 0.02
    d = torch.full((count, rows, columns // size), 0.008, device=device)
    state = Rows(w, d, 0 * d, torch.zeros_like(w), getattr(scheme, "bits", 0))
    spent = {"matrices": float(count)}
    for kind, factors in (("", known), ("_products", only)):
        for name, step in (("feed_back", batched.feed_back), ("settle", batched.settle)):
            step(state, factors)
            start = now(device)
            step(state, factors)
            spent[name + kind] = now(device) - start
    return spent


def nothing(*_: object) -> None:
    """Leave out what walks the columns of a block."""


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
