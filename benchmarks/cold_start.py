"""Seconds from the start of a process to the first tokens of a model, with and without a cache.

    python -m benchmarks.cold_start ARTIFACT [--prompt 100] [--tokens 16] [--repeat 2]

Two processes with one Triton cache, which is empty at first: `cold`, then `warm`. Each line has the
seconds since the process was started when it had

    imported   what `qwen35 run` imports
    opened     the artifact's headers
    loaded     its weights, on the GPU
    first      given the first token: kernels compiled, the prompt computed
    second     given the next: the step recorded as a graph
    all        given as many tokens as were asked for

and the kernels compiled, with the sum of the seconds that took. Token ids are random, and no
tokenizer is loaded. The artifact lies in the page cache if it was written just now.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cold_start.jsonl"
STARTED = "COLD_START_AT"


def child(artifact: Path, prompt: int, tokens: int, *, ahead: bool) -> dict[str, Any]:
    """Generate in this process; return the seconds at which each thing was done."""
    begun, told = float(os.environ[STARTED]), {}

    def done(what: str) -> None:
        told[what] = round(time.time() - begun, 3)

    done("python")
    import torch
    import triton

    from qwen35_convert import api, cli  # noqa: F401
    from qwen35_convert.containers.registry import open_checkpoint
    from runtime.load import load_model
    from runtime.serve.engine import generate

    compiled: list[float] = []

    def count(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(times.total / 1e6)

    triton.knobs.compilation.listener = count
    done("imported")
    checkpoint = open_checkpoint(artifact)
    done("opened")
    torch.zeros(1, device="cuda")
    done("cuda")
    model = load_model(checkpoint, "cuda", torch.bfloat16, keep_fp8=True)
    torch.cuda.synchronize()
    done("loaded")
    ids = torch.randint(model.config.sizes["V"], (prompt,)).tolist()
    if ahead:
        prepare(model, ids, tokens)
        done("ahead")
    for i, _ in enumerate(generate(model, ids, tokens)):
        if i < 2:
            done(("first", "second")[i])
            told[("first", "second")[i] + "_kernels"] = len(compiled)
    done("all")
    return told | {"kernels": len(compiled), "compile_s": round(sum(compiled), 3)}


def prepare(model: Any, ids: list[int], tokens: int) -> None:
    import torch

    from runtime.kernels.ahead import compiled_together
    from runtime.kernels.sample.likeliest import likeliest
    from runtime.model import hidden_states, logits
    from runtime.state import PADDING, Batch, Room, Span, State

    room = Room(1, len(ids) + tokens)
    state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
    pools = state.pools()
    with torch.inference_mode(), compiled_together():
        prompt = Batch.pack([], [Span(ids, 0, 0, 0)], model.device)
        likeliest(logits(model, hidden_states(model, pools, prompt)[-1:]), -1)
        rows = Batch.pack([PADDING], [], model.device)
        likeliest(logits(model, hidden_states(model, pools, rows)), -1)
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args(arguments)
    if options.child:
        print(
            json.dumps(child(options.artifact, options.prompt, options.tokens, ahead=options.ahead))
        )
        return 0
    with tempfile.TemporaryDirectory() as cache:
        for i in range(options.repeat):
            words = [
                sys.executable,
                "-m",
                "benchmarks.cold_start",
                str(options.artifact),
                "--child",
            ]
            words += ["--prompt", str(options.prompt), "--tokens", str(options.tokens)]
            words += ["--ahead"] if options.ahead else []
            environment = os.environ | {"TRITON_CACHE_DIR": cache, STARTED: str(time.time())}
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            print(
                ("cold", "warm")[min(i, 1)],
                "ahead" if options.ahead else "",
                done.stdout.strip() or done.stderr[-1500:],
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
