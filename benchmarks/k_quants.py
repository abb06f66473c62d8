"""Check and time the GPU's encoders of ggml's types: BF16 weights in, the bytes of a GGUF out.

    python -m benchmarks.k_quants [TYPE ...]

Some rows are compared with the CPU's encoder to the byte; what differs is not timed, and the exit
code is 1. One JSON line for each type is appended to benchmarks/results/gguf.jsonl, with an
importance where the encoder knows one: gb_per_s is BF16 read, the median of some calls with a cold
L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.convert import commit
from benchmarks.device_time import timed
from benchmarks.lines import append
from quant.ggml import codec, kinds
from runtime.kernels.encode.ggml import ENCODERS, encode

RESULTS = Path(__file__).parent / "results" / "gguf.jsonl"
SHAPE = (32768, 8192)
FEWER = 4096  # rows for the I-quants, which take a hundred times as long
CHECKED = 64


def main() -> int:
    """Run the types; return 1 if bytes differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("types", nargs="*", default=list(ENCODERS), help="ggml's names")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args()
    whole = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    failed = 0
    for name in options.types:
        weighted = ENCODERS[name].weighted
        importance = torch.rand(SHAPE[1]) if weighted else None
        w = whole[:FEWER] if name in kinds.I_QUANTS else whole
        some = w[:CHECKED].contiguous()
        expected = codec.encode(name, some.cpu(), importance=importance)
        passed = torch.equal(encode(name, some, importance).cpu(), expected)
        failed += not passed
        line = {"what": "gguf_gpu", "mix": name.lower(), "tool": "qwen35", "same_bytes": passed}
        line |= {"importance": weighted}
        if passed:
            weights = None if importance is None else importance.cuda()
            call = partial(ENCODERS[name].call, name, w, weights)
            ms = timed(call, "cuda")["ms"]
            line |= {"gb": 2 * w.numel() / 1e9, "ms": ms, "gb_per_s": 2 * w.numel() / ms / 1e6}
        line |= {
            "card": torch.cuda.get_device_name(),
            "commit": options.commit or commit(),
            "versions": {package: metadata.version(package) for package in ("torch", "triton")},
        }
        print(json.dumps(line))
        if passed:
            append(options.results, line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
