"""What the decode loop adds to a model's step: tokens from requests, sampled, drafted.

    python -m benchmarks.decode_loop [--models 0.8B-bf16 ...] [--tokens 100] [--results FILE]

Random weights of the released shapes, and a random MTP head, which is never right. Each line:

    batch, way   how many requests at once, and how: greedy, sampled, or drafted
    ms           wall time between two tokens of a request; of a drafted one, between two steps
    step_ms      the model's step alone: a CUDA graph of the same rows at the same length
    same         how many of its tokens a drafted request has in common with the plain one before
                 they first differ: in bfloat16 two rows round otherwise than one

`--device cpu` runs tiny models, to test this script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.hopper import TINY, commit, record
from benchmarks.models import CONFIGS, Maker, random_model
from runtime.kernels.delta_rule.rule import CHUNK
from runtime.model import Model, Mtp
from runtime.serve.engine import Engine, Request, Speculation
from runtime.serve.sample import GREEDY, Sampling
from runtime.timing import decode_time

RESULTS = Path(__file__).parent / "results" / "decode_loop.jsonl"
PROMPT = 1000
WAYS = {"greedy": GREEDY, "sampled": Sampling(0.7, top_k=20, top_p=0.8)}


def model_of(name: str, device: str) -> Model:
    """Return a random model with an MTP head."""
    size, kind = name.rsplit("-", 1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(CONFIGS[size](), device, dtype, stored=kind)
    make, width = Maker(device, dtype, stored=kind), model.config.sizes["H"]
    layer = make.layer(model.config, "full_attention")
    first, second, last = (make.norm(width) for _ in range(3))
    return replace(model, mtp=Mtp(first, second, make.plain(width, 2 * width), layer, last))


def requests_of(model: Model, count: int, tokens: int, way: str) -> list[Request]:
    """Return requests of one length."""
    length = min(PROMPT, 10 * tokens)
    ids = torch.randint(model.config.sizes["V"], (count, length)).tolist()
    return [Request(prompt, tokens, WAYS[way]) for prompt in ids]


def engine_ms(model: Model, requests: Sequence[Request]) -> float:
    """Return the milliseconds between tokens, from the tenth on, when all is recorded."""
    whole = -(-sum(len(request.prompt) for request in requests) // CHUNK) * CHUNK
    engine = Engine(model, slots=len(requests), max_len=requests[0].longest, chunk=whole)
    for request in requests:
        engine.add(request)
    while len(requests[-1].tokens) < 10:
        engine.step()
    begun, started = len(requests[0].tokens), time.perf_counter()
    while engine.busy:
        engine.step()
    return (time.perf_counter() - started) * 1e3 / (len(requests[0].tokens) - begun)


def drafted_ms(model: Model, request: Request) -> float:
    """Return the milliseconds between steps."""
    speculation = Speculation(model, request)
    tokens = speculation.run()
    for _ in range(10):
        next(tokens)
    begun, started = speculation.drafted, time.perf_counter()
    list(tokens)
    return (time.perf_counter() - started) * 1e3 / (speculation.drafted - begun)


def measure(model: Model, tokens: int, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each way."""
    for batch in batches:
        for way in WAYS:
            requests = requests_of(model, batch, tokens, way)
            ms = engine_ms(model, requests)
            step = decode_time(model, batch, requests[0].longest).ms
            yield {"batch": batch, "way": way, "ms": ms, "step_ms": step}
            if batch == 1:
                again = Request(requests[0].prompt, tokens, WAYS[way])
                ms = drafted_ms(model, again)
                pairs = enumerate(zip(requests[0].tokens, again.tokens, strict=True))
                same = next((i for i, (a, b) in pairs if a != b), tokens)
                yield {"batch": 1, "way": f"{way} drafted", "ms": ms, "step_ms": step, "same": same}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    told = {
        "card": torch.cuda.get_device_name() if on_gpu else "CPU",
        "commit": options.commit or commit(),
        "versions": {package: metadata.version(package) for package in ("torch", "triton")},
    }
    print(json.dumps(told))
    kept = options.results if on_gpu else None
    for name in options.models or (["0.8B-bf16"] if on_gpu else TINY):
        model = model_of(name, options.device)
        for line in measure(model, options.tokens, options.batches):
            record({"what": "decode_loop", "model": name} | line | told, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
