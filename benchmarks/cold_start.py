"""Seconds from the start of a process to the first tokens of a model, with and without a cache.

    python -m benchmarks.cold_start ARTIFACT [--prompt 100] [--tokens 16] [--repeat 2]

Processes with one Triton cache, which is empty at first: `cold`, then `warm` ones. A line has the
seconds after the start of the process at which it had

    imported   what `qwen35 run` imports
    opened     the artifact's headers
    loaded     its weights, on the GPU
    first      the first token: kernels compiled, the prompt computed, the step recorded as a graph
    all        as many tokens as were asked for

and `kernels`, which were compiled, `compile_s`, the seconds of all of them, and `load`, how many
other processes wanted a core. Token ids are random and no tokenizer is loaded. The artifact lies in
the page cache, if it was written just now.
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

from benchmarks.convert import commit
from benchmarks.lines import record

RESULTS = Path(__file__).parent / "results" / "cold_start.jsonl"
STARTED = "COLD_START_AT"  # the variable that tells a process when it was started


def told(artifact: Path, prompt: int, tokens: int, device: str) -> dict[str, Any]:
    """Generate in this process, and return what a line has of it."""
    import torch

    from qwen35_convert import api, cli
    from qwen35_convert.containers.registry import open_checkpoint
    from runtime.load import load_model
    from runtime.serve.engine import generate

    assert api.run_text, cli.COMMANDS
    compiled: list[float] = []
    done = {"imported": _now()}

    def count(*, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(times.total / 1e6)

    on_gpu = device == "cuda"
    if on_gpu:
        import triton

        triton.knobs.compilation.listener = count
    checkpoint = open_checkpoint(artifact)
    done["opened"] = _now()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = load_model(checkpoint, device, dtype, keep_fp8=on_gpu)
    if on_gpu:
        torch.cuda.synchronize()
    done["loaded"] = _now()
    ids = torch.randint(model.config.sizes["V"], (prompt,)).tolist()
    text = generate(model, ids, tokens)
    next(text)
    done["first"] = _now()
    list(text)
    done |= {"all": _now(), "compile_s": round(sum(compiled), 2)}
    card = torch.cuda.get_device_name() if on_gpu else device
    return done | {"kernels": len(compiled), "load": round(os.getloadavg()[0], 1), "card": card}


def _now() -> float:
    return round(time.time() - float(os.environ[STARTED]), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and append the lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--prompt", type=int, default=100, help="tokens")
    parser.add_argument("--tokens", type=int, default=16, help="that are generated")
    parser.add_argument("--repeat", type=int, default=2, help="processes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args(arguments)
    if STARTED in os.environ:
        print(json.dumps(told(options.artifact, options.prompt, options.tokens, options.device)))
        return
    named = {"what": "cold_start", "model": options.artifact.name}
    common = {"prompt": options.prompt, "commit": options.commit or commit()}
    words = [sys.executable, "-m", "benchmarks.cold_start", *(arguments or sys.argv[1:])]
    with tempfile.TemporaryDirectory() as cache:
        for i in range(options.repeat):
            more = {"TRITON_CACHE_DIR": cache, STARTED: str(time.time())}
            done = subprocess.run(words, env=os.environ | more, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            record(options.results, named | {"cache": "warm" if i else "cold"} | found | common)


if __name__ == "__main__":
    main()
