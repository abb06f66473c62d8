"""Check and time the GPU's K-quant encoders: BF16 weights in, the bytes of a GGUF out.

    python -m benchmarks.k_quants

Some rows are compared with the CPU's encoder to the byte; what differs is not timed, and the exit
code is 1. One JSON line for each type is appended to benchmarks/results/gguf.jsonl: gb_per_s is
BF16 read, the median of some calls with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.convert import commit
from benchmarks.kernels import timed
from benchmarks.lines import append
from runtime.kernels.encode.k_quants import encode_k, encode_k_reference

RESULTS = Path(__file__).parent / "results" / "gguf.jsonl"
SHAPE = (32768, 8192)
CHECKED = 64


def main() -> int:
    """Run both types; return 1 if bytes differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    options = parser.parse_args()
    w = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    failed = 0
    for name in ("Q4_K", "Q6_K"):
        some = w[:CHECKED].contiguous()
        passed = torch.equal(encode_k(name, some).cpu(), encode_k_reference(name, some.cpu()))
        failed += not passed
        line = {"what": "gguf_gpu", "mix": name.lower(), "tool": "qwen35", "same_bytes": passed}
        if passed:
            ms = timed(lambda name=name: encode_k(name, w), "cuda")["ms"]
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
