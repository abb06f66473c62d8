"""Measure the memory and time of `qwen35 verify --level logits` on a checkpoint larger than it.

    python benchmarks/verify.py [--folder FOLDER] [--text FILE] [--cores 2]

A checkpoint of 0.8B's layers with an untied head (2 GB) is generated and converted to fp8-block;
then both are compared on text, layer by layer, in a process of its own on the CPU: once keeping the
source's side (`--logits-cache`), once more with what was kept. Peak memory is that process's. One
JSON line for each goes to benchmarks/results/verify.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import CASES, ENVIRONMENT, ROOT, commit, generate, measure

RESULTS = Path(__file__).parent / "results" / "verify.jsonl"
NANO = ROOT / "tests" / "data" / "nano-dense"
LIMIT_MB = 800


def main() -> None:
    """Generate, convert, verify; fail if the peak is over the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--text", type=Path, help="default: 4 kB of the bundled text")
    parser.add_argument("--cores", default="1", help="threads of torch's")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    config, form = CASES["dense"]
    CASES["untied"] = (config | {"tie_word_embeddings": False}, form | {"head": True})
    if options.generate:
        generate(options.generate, "untied")
        return
    ENVIRONMENT["OMP_NUM_THREADS"] = options.cores
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for line in run(Path(folder), options.text):
            print(json.dumps(line))
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            peak = line["rss_mb"]
            assert peak < LIMIT_MB, f"peak memory {peak} MB, expected {LIMIT_MB}"


def run(folder: Path, text: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the figures of a verification that keeps the source's side, and of one that has it."""
    source, out = folder / "source", folder / "out"
    measure(sys.executable, __file__, "--generate", str(source))
    shutil.copy(NANO / "tokenizer.json", source)
    cli = (sys.executable, "-m", "qwen35_convert.cli")
    measure(*cli, "convert", str(source), "-o", str(out), "--no-verify")
    if text is None:
        text = folder / "text.txt"
        bundled = ROOT / "qwen35_convert" / "text" / "default_text.txt"
        text.write_text(bundled.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    verify = [*cli, "verify", str(out), "--against", str(source), "--level", "logits", "--json"]
    verify += ["--text", str(text), "--logits-cache", str(folder / "cache")]
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    for cached in (False, True):
        yield {
            "what": "verify",
            "level": "logits",
            "gb": round(size / 1e9, 3),
            "cached": cached,
            **measure(*verify),
            "cores": ENVIRONMENT["OMP_NUM_THREADS"],
            "load": round(os.getloadavg()[0], 1),
            "text_bytes": text.stat().st_size,
            "commit": commit(),
        }


if __name__ == "__main__":
    main()
