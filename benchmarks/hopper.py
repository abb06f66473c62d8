"""Time whole models of random weights against the floors of the card, and the delta rule alone.

    python -m benchmarks.hopper [--models 27B-fp8 ...] [--only decode gdn_decode ...] [--check-only]

    decode, prefill           one token for each sequence of a batch; a prompt
    gdn_prefill, gdn_decode   the delta rule of one layer, with the heads of the model

First the model is checked: two layers of it, a prompt and a few decode steps, against the same on
the CPU in float32; the rule alone against the recurrence in float64. What fails is not timed, and
the exit code is 1. Then each step is timed as a CUDA graph and as single launches: the median of
some repeats, fewer of prompts above 13,107 tokens, one above 65,536; the rule with the L2 cache
overwritten before each. One JSON line for each is appended to benchmarks/results/hopper.jsonl:

    ms, eager_ms                 of the graph, of single launches
    floor_ms                     least bytes or operations of it on this card (`runtime/floors.py`)
    fraction_of_floor            floor_ms / ms
    fraction_of_copy_bandwidth   of gdn_decode: its bytes / ms over what a device copy reaches
    peer_ms, peer                what another engine needs: models as its makers publish it, the
                                 rule measured beside ours, if flash-linear-attention is installed

A check takes a CPU longer than a GPU: with `--lock FILE`, held alone while something is timed,
several of these scripts check at once, then time one after another. `--device cpu` runs tiny models
in Triton's interpreter, to test this script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from benchmarks.convert import commit
from benchmarks.hopper_rule import measure_rule
from benchmarks.lines import append, rounded
from benchmarks.models import CONFIGS, random_model
from runtime.floors import Card, card_of, decode_floor_ms, prefill_floor_ms
from runtime.kernels.launch import interpreting
from runtime.kernels.linear.packed import PackedWeight, unpacked_reference
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.moe import layer, packed_row
from runtime.kernels.moe.packed_row import routed_inner
from runtime.kernels.moe.routing import route_absorbed
from runtime.model import hidden_states, logits
from runtime.state import Batch, Room, Span, State
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
PACKED = ("nvfp4", "int4")
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


def on_cpu(value: Any) -> Any:
    """Return the same in float32 on the CPU; FP8 weights keep their codes."""
    if isinstance(value, Fp8Weight):
        return Fp8Weight(value.codes.cpu(), value.scale.cpu(), value.dynamic)
    if isinstance(value, PackedWeight):
        return unpacked_reference(value).cpu()
    if isinstance(value, Tensor):
        return value.float().cpu()
    if isinstance(value, tuple):
        return tuple(on_cpu(x) for x in value)
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "layer_types"):
        return replace(value, **{n: on_cpu(getattr(value, n)) for n in value.__dataclass_fields__})
    return value


@torch.inference_mode()
def answers(model: Model, prompt: Tensor, steps: Tensor) -> list[Tensor]:
    """Return hidden states: of the prompt, then of single tokens, one and two sequences at once."""
    room = Room(2, len(prompt) + len(steps) + 1)
    state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
    pools, ids, end = state.pools(), prompt.tolist(), len(prompt)
    spans = [Span(ids, 0, slot, slot) for slot in (0, 1)]
    outputs = [hidden_states(model, pools, Batch.pack([], spans, model.device))]
    for i, token in enumerate(steps.tolist()):
        rows = [Span([token], end + i, 0, 0)]
        if i % 2:  # the second sequence goes half as fast
            rows.append(Span([token], end + i // 2, 1, 1))
        outputs.append(hidden_states(model, pools, Batch.pack(rows, [], model.device)))
    return [x.float().cpu() for x in outputs]


def check(name: str, device: str, dtype: torch.dtype, *, stored: str) -> dict[str, Any]:
    """Compare two layers of the model with float32, unquantised inputs.

    A dozen roundings to bfloat16 of 2^-9 each come to less than 0.01. Quantised inputs may cost a
    tenth more than they cost the reference: codes next to a tie go one way or the other. So do
    experts: where the kernels are given their choice, float32 is given the same one.
    """
    model = random_model(CONFIGS[name](), device, dtype, stored=stored, layers=2)
    vocabulary = model.config.sizes["V"]
    # on a CPU: more than 16 rows would be quantised, which the interpreter does otherwise
    length, num_steps = (20, 2) if device == "cuda" else (7, 1)
    prompt, steps = torch.randint(vocabulary, (length,)), torch.randint(vocabulary, (num_steps,))
    choices: list[Tensor] = []
    with running(device), recorded(choices):
        got = answers(model, prompt, steps)
    wide = on_cpu(model)
    undynamic = replace(wide, layers=tuple(_undynamic(x) for x in wide.layers))
    with repeated(choices) if stored in PACKED else nullcontext():
        exact = answers(undynamic, prompt, steps)
    error, allowed = distance(got, exact), 0.01
    if stored == "fp8":
        allowed += 1.1 * distance(answers(wide, prompt, steps), exact)
    rows = torch.randint(vocabulary, (64,), device=model.device)
    hidden = got[1].to(model.device, dtype)
    scores = hidden.double() @ model.head[rows].double().T
    with running(device):
        head = distance([logits(model, hidden)[:, rows]], [scores])
    passed = error < allowed and head < 0.005
    return {"passed": passed, "error": error, "allowed": allowed, "head_error": head}


def distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative error of all outputs together."""
    a, b = torch.cat(list(got)).double(), torch.cat(list(expected)).double()
    return float((a - b).norm() / b.norm())


@contextmanager
def recorded(choices: list[Tensor]) -> Iterator[None]:
    """Keep which experts are chosen, call by call: kernels that choose for themselves choose alike.

    Those of FP8 are not seen.
    """

    def record(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights, experts = route_absorbed(logits, k)
        choices.append(experts.cpu())
        return weights, experts

    def inner(x_1H: Tensor, gate_up: PackedWeight, logits: Tensor, k: int) -> Tensor:
        record(logits, k)
        return routed_inner(x_1H, gate_up, logits, k)

    with (
        patch.object(layer, "route_absorbed", record),
        patch.object(packed_row, "routed_inner", inner),
    ):
        yield


@contextmanager
def repeated(choices: Sequence[Tensor]) -> Iterator[None]:
    """Choose the experts that were recorded, with this run's own weights for them."""
    left = iter(choices)

    def repeat(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        experts = next(left)
        assert experts.shape == (len(logits), k + 1), "a call was not recorded"
        routed = logits[:, :-1].gather(1, experts[:, :-1]).softmax(dim=1)
        return torch.cat([routed, torch.sigmoid(logits[:, -1:])], dim=1), experts

    with patch.object(layer, "route_absorbed", repeat):
        yield
    assert next(left, None) is None, "float32 made fewer calls"


def _undynamic(value: Any) -> Any:
    """Return the same with FP8 weights that leave their inputs as they are."""
    if isinstance(value, Fp8Weight):
        return replace(value, dynamic=False)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return replace(value, **{name: _undynamic(getattr(value, name)) for name in names})
    return value


def running(device: str) -> AbstractContextManager[None]:
    """Return what kernels run within."""
    return nullcontext() if device == "cuda" else interpreting()


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
