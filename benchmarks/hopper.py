"""Time whole models of random weights against the floors of the card, and the delta rule alone.

    python -m benchmarks.hopper [--models 27B-fp8 ...] [--only decode gdn_decode ...] [--check-only]

    decode, prefill           one token for each sequence of a batch; a prompt
    gdn_prefill, gdn_decode   the delta rule of one layer, with the heads of the model

First the model is checked: two layers of it, prompts of three lengths and a few decode steps, by
references in float32 (`hopper_check`); the rule alone by the recurrence in float64. What fails is
not timed, and the exit code is 1. Then each step is timed as a CUDA graph and as single launches:
the median of some repeats, fewer of prompts above 13,107 tokens, one above 65,536; the rule with
the L2 cache overwritten before each. One JSON line for each is appended to
benchmarks/results/hopper.jsonl:

    ms, eager_ms                 of the graph, of single launches
    floor_ms                     least bytes or operations of it on this card (`runtime/floors.py`)
    fraction_of_floor            floor_ms / ms
    fraction_of_copy_bandwidth   of gdn_decode: its bytes / ms over what a device copy reaches
    peer_ms, peer                what another engine needs: models as its makers publish it, the
                                 rule measured beside ours, if flash-linear-attention is installed

With `--lock FILE`, held alone while something is timed, several of these scripts check at once,
then time one after another. `--device cpu` runs tiny models in Triton's interpreter, to test this
script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.convert import commit
from benchmarks.hopper_check import check, running
from benchmarks.hopper_rule import measure_rule
from benchmarks.lines import append, rounded
from benchmarks.models import CONFIGS, random_model
from runtime.floors import Card, card_of, decode_floor_ms, prefill_floor_ms
from runtime.timing import Timing, alone, decode_time, prefill_time
from runtime.weights import Model

RESULTS = Path(__file__).parent / "results" / "hopper.jsonl"
CONTEXT = 4096
MODELS = (
    "27B-fp8",
    "35B-A3B-fp8",
    "9B-bf16",
    "0.8B-bf16",
    "27B-nvfp4",
    "35B-A3B-nvfp4",
    "27B-int4",
    "35B-A3B-int4",
)
OTHERS = ("27B-bf16", "35B-A3B-bf16")
TINY = ("tiny-bf16", "tiny-moe-fp8", "tiny-nvfp4", "tiny-moe-int4")
WHAT = ("decode", "prefill", "gdn_prefill", "gdn_decode")
BATCHES = (1, 8, 64)
PROMPTS = (512, 8192)
# SGLang's cookbook: one request of 8192 tokens on an H100, HTTP and MTP prefill included; TPOT on
# an H200 without speculation
PEERS = {
    ("prefill", "27B-fp8"): (521.0, "SGLang 0.5.16, time to first token, H100"),
    ("prefill", "35B-A3B-fp8"): (149.0, "SGLang 0.5.16, time to first token, H100"),
    ("prefill", "9B-bf16"): (240.0, "SGLang 0.5.16, time to first token, H100"),
    ("prefill", "0.8B-bf16"): (53.0, "SGLang 0.5.16, time to first token, H100"),
    ("decode", "27B-fp8"): (10.25, "SGLang 0.5.15, H200"),
    ("decode", "35B-A3B-fp8"): (3.60, "SGLang 0.5.15, H200"),
    ("decode", "9B-bf16"): (5.16, "SGLang 0.5.15, H200"),
    ("decode", "0.8B-bf16"): (1.47, "SGLang 0.5.15, H200"),
}


def measure(name: str, card: Card, options: Any) -> list[dict[str, Any]]:
    """Return the lines of a model."""
    size, kind = name.rsplit("-", 1)
    device, steps = options.device, {"decode", "prefill"} & set(options.only)
    if not steps:
        return []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with alone(options.lock, shared=True):
        verdict = check(size, device, dtype, stored=kind)
    print(name, json.dumps(verdict), flush=True)
    if options.check_only or not verdict["passed"]:
        return [{"what": "check", "model": name, **verdict}]
    with alone(options.lock):
        return timed(name, random_model(CONFIGS[size](), device, dtype, stored=kind), card, options)


def timed(name: str, model: Model, card: Card, options: Any) -> list[dict[str, Any]]:
    """Return the lines of a model that has passed its check."""
    kind, device = name.rsplit("-", 1)[1], options.device
    config, lines, tiny = model.config, [], device == "cpu"
    decodes, prefills = "decode" in options.only, "prefill" in options.only
    for context, batch in product(options.contexts, options.batches if decodes else ()):
        context = min(context, 40) if tiny else context
        floor = decode_floor_ms(config, card, stored=kind, batch=batch, context=context)
        with running(device):
            took = decode_time(model, batch, context)
        lines.append(line("decode", name, took, floor) | {"batch": batch, "context": context})
    for tokens in options.prompts if prefills else ():
        tokens = min(tokens, 10) if tiny else tokens
        floor = prefill_floor_ms(config, card, stored=kind, tokens=tokens)
        with running(device):
            took = prefill_time(model, tokens)
        lines.append(line("prefill", name, took, floor) | {"batch": 1, "tokens": tokens})
    return lines


def line(what: str, name: str, took: Timing, floor: float) -> dict[str, Any]:
    """Return what is recorded of one measurement."""
    return {
        "what": what, "model": name, "ms": took.ms, "eager_ms": took.eager_ms, "floor_ms": floor,
        "fraction_of_floor": floor / took.ms,
    }  # fmt: skip


def with_peer(found: dict[str, Any]) -> dict[str, Any]:
    """Add the published figure of another engine, where it is for the same batch and length."""
    if "peer_ms" in found:
        return found
    same = found.get("batch") == 1 and found.get("tokens", 8192) == 8192
    same = same and found.get("context", CONTEXT) == CONTEXT
    peer = PEERS.get((found["what"], found["model"])) if same else None
    return found | ({"peer_ms": peer[0], "peer": peer[1]} if peer else {"peer_ms": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *OTHERS, *TINY), metavar="MODEL")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, metavar="WHAT")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of decode")
    contexts = {"nargs": "+", "type": int, "metavar": "TOKENS"}
    parser.add_argument("--contexts", **contexts, default=(CONTEXT,), help="of decode")
    parser.add_argument("--prompts", **contexts, default=PROMPTS, help="of prefill")
    parser.add_argument("--check-only", action="store_true", help="time and record nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    parser.add_argument("--lock", type=Path, help="a file to lock: load at once, time in turn")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    on_gpu = options.device == "cuda"
    named = torch.cuda.get_device_name() if on_gpu else "interpreter"
    card = card_of(named) if on_gpu else Card("interpreter", 1e9)
    assert card is not None, f"no floors are known for {named}"
    told = {
        "card": named, "commit": options.commit or commit(),
        "versions": {package: metadata.version(package) for package in ("torch", "triton")},
    }  # fmt: skip
    print(json.dumps(told | {"seed": options.seed}))
    failed = 0
    for name in options.models or (MODELS if on_gpu else TINY):
        rules = () if name in TINY else measure_rule(name, card, options)
        for found in chain(measure(name, card, options), rules):
            failed += found["what"] == "check" and not found["passed"]
            kept = options.results if on_gpu and not options.check_only else None
            record(with_peer(found) | told, kept)
    return int(failed > 0)


def record(found: dict[str, Any], results: Path | None) -> None:
    """Print a line, and keep it if it was measured."""
    shown = rounded(found, 4)
    print(json.dumps(shown), flush=True)
    if results is not None and "ms" in found:
        append(results, shown)


if __name__ == "__main__":
    sys.exit(main())
