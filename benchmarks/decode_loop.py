"""What the decode loop adds to a model's step: tokens from requests, sampled, drafted.

    python -m benchmarks.decode_loop [--models 0.8B-bf16 ...] [--tokens 100] [--results FILE]
    python -m benchmarks.decode_loop --trained FOLDER --text FILE [--prompts 8]

Random weights of the released shapes, and a random MTP head, which is never right. Each line:

    batch, way   how many requests at once, and how they are sampled
    drafts       how many tokens are drafted in each step
    ms           wall time between two tokens of a request; with drafts, between two steps
    step_ms      the model's step alone: a CUDA graph of the same rows at the same length
    same         how many of its tokens a drafted request has in common with the plain one before
                 they first differ: in bfloat16 several rows round otherwise than one

With `--trained`, a model whose MTP head is trained goes on from pieces of a text:

    accepted     of the drafts, the share that was right
    per_step     tokens of a step
    ms           wall time for each token, on a CPU core time
    faster       how many times as many tokens as without drafts in the same time
    same         the share of prompts whose text is that without drafts

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
from tokenizers import Tokenizer

from benchmarks.convert import commit
from benchmarks.hopper import TINY, record
from benchmarks.models import CONFIGS, Maker, random_model
from qwen35_convert.containers.registry import open_checkpoint
from runtime.kernels.delta_rule.rule import CHUNK
from runtime.load import load_model
from runtime.serve.engine import Engine
from runtime.serve.request import Request
from runtime.serve.sample import GREEDY, Sampling
from runtime.serve.speculation import Speculation
from runtime.timing import decode_time
from runtime.weights import Model, Mtp

RESULTS = Path(__file__).parent / "results" / "decode_loop.jsonl"
PROMPT = 1000
PIECE, START = 100, 10  # tokens before the text, and before the clock starts
DRAFTS = 1, 2, 3
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


def drafted_ms(model: Model, request: Request, drafts: int) -> float:
    """Return the milliseconds between steps."""
    speculation = Speculation(model, request, drafts)
    tokens = speculation.run()
    for _ in range(10):
        next(tokens)
    begun, started = speculation.drafted, time.perf_counter()
    list(tokens)
    return (time.perf_counter() - started) * 1e3 * drafts / (speculation.drafted - begun)


def measure(model: Model, tokens: int, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each way."""
    for batch in batches:
        for way in WAYS:
            requests = requests_of(model, batch, tokens, way)
            ms = engine_ms(model, requests)
            step = decode_time(model, batch, requests[0].longest).ms
            yield {"batch": batch, "way": way, "ms": ms, "step_ms": step}
            for drafts in DRAFTS if batch == 1 else ():
                again = Request(requests[0].prompt, tokens, WAYS[way])
                ms = drafted_ms(model, again, drafts)
                same = agreement(requests[0].tokens, again.tokens)
                line = {"batch": 1, "way": way, "drafts": drafts, "ms": ms, "step_ms": step}
                yield line | {"same": same}


def agreement(ours: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens there are before the first difference."""
    pairs = enumerate(zip(ours, others, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def trained_lines(
    folder: Path, text: Path, device: str, prompts: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield a line for each way and number of drafts, from none on."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(open_checkpoint(folder), device, dtype, keep_fp8=device == "cuda")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    pieces = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE, len(ids) // prompts)]
    for way, sampling in WAYS.items():
        plain, took = continued(model, pieces[:prompts], tokens, sampling, 0)
        yield {"way": way, "drafts": 0} | took
        for drafts in DRAFTS:
            texts, line = continued(model, pieces[:prompts], tokens, sampling, drafts)
            same = sum(a == b for a, b in zip(texts, plain, strict=True)) / len(texts)
            told = {"way": way, "drafts": drafts, "same": same}
            yield told | line | {"faster": took["ms"] / line["ms"]}


def continued(
    model: Model, pieces: Sequence[Sequence[int]], tokens: int, sampling: Sampling, drafts: int
) -> tuple[list[list[int]], dict[str, float]]:
    """Return the texts after these pieces, and what a token took and how drafts did."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    texts, spent, counted, drafted, accepted = [], 0.0, 0, 0, 0
    for number, piece in enumerate(pieces):
        request = Request(piece, tokens, replace(sampling, seed=number))
        speculation = Speculation(model, request, drafts) if drafts else None
        answer = speculation.run() if speculation else one_by_one(model, request)
        begun = [next(answer) for _ in range(START)]
        started = clock()
        texts.append([*begun, *answer])
        spent, counted = spent + clock() - started, counted + tokens - START
        if speculation:
            drafted, accepted = drafted + speculation.drafted, accepted + speculation.accepted
    line = {"ms": spent * 1e3 / counted}
    if drafts:
        line |= {"accepted": accepted / drafted, "per_step": 1 + accepted * drafts / drafted}
    return texts, line


def one_by_one(model: Model, request: Request) -> Iterator[int]:
    """Yield the tokens of a request that runs alone."""
    engine = Engine(model, slots=1, max_len=request.longest)
    engine.add(request)
    while engine.busy:
        yield from (token for _, token in engine.step())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", metavar="MODEL")
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="with a trained MTP head")
    parser.add_argument("--text", type=Path, help="what a trained model goes on from")
    parser.add_argument("--prompts", type=int, default=8)
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
    if options.trained:
        told["text"] = options.text.stem
        for line in trained_lines(
            options.trained, options.text, options.device, options.prompts, options.tokens
        ):
            name = {"what": "decode_loop", "model": options.trained.name}
            record(name | line | told, options.results)
        return 0
    for name in options.models or (["0.8B-bf16"] if on_gpu else TINY):
        model = model_of(name, options.device)
        for line in measure(model, options.tokens, options.batches):
            record({"what": "decode_loop", "model": name} | line | told, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
