"""Measure the time and memory of `qwen35 verify`, level by level, beside the conversion's.

    python -m benchmarks.verify [--folder FOLDER] [--text FILE] [--cores 2] [--levels structure ...]

A checkpoint of 0.8B's layers with an untied head (2 GB; --layers 24: more of them) is generated and
converted to fp8-block;
then the two are compared, on the CPU, in processes of their own: headers; tensors, which encodes
them again; logits on text, once keeping the source's side (`--logits-cache`), once more with what
was kept. Peak memory is a process's. One JSON line for each goes to
benchmarks/results/verify.jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.convert import CASES, ENVIRONMENT, ROOT, commit, generate, measure
from benchmarks.lines import record

RESULTS = Path(__file__).parent / "results" / "verify.jsonl"
NANO = ROOT / "tests" / "data" / "nano-dense"
LIMIT_MB = 1100  # two threads, 8192 tokens; one thread and 4 kB of text: 700
LEVELS = ("structure", "tensors", "logits")


def main() -> None:
    """Generate, convert, verify; fail if the peak is over the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--text", type=Path, help="default: 4 kB of the bundled text")
    parser.add_argument("--cores", default="1", help="threads of torch's")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    config, form = CASES["dense"]
    sizes = {"tie_word_embeddings": False, "num_hidden_layers": options.layers}
    CASES["untied"] = (config | sizes, form | {"head": True})
    if options.generate:
        generate(options.generate, "untied")
        return
    ENVIRONMENT["OMP_NUM_THREADS"] = options.cores
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for measured in run(Path(folder), options):
            record(RESULTS, measured)
            peak = measured["rss_mb"]
            assert peak < LIMIT_MB, f"peak memory {peak} MB, expected {LIMIT_MB}"


def run(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of the conversion, and of its verification at each level."""
    source, out = folder / "source", folder / "out"
    text, levels = options.text, options.levels
    made = ("--layers", str(options.layers), "--generate", str(source))
    measure(sys.executable, "-m", "benchmarks.verify", *made)
    shutil.copy(NANO / "tokenizer.json", source)
    cli = (sys.executable, "-m", "qwen35_convert.cli")
    yield line("convert", source, *cli, "convert", str(source), "-o", str(out), "--no-verify")
    verify = [*cli, "verify", str(out), "--against", str(source), "--json", "--level"]
    for level in levels:
        if level != "logits":
            yield line(level, source, *verify, level)
    if "logits" in levels:
        text = text or beginning_of_ours(folder)
        verify += ["logits", "--text", str(text), "--logits-cache", str(folder / "cache")]
        for cached in (False, True):
            measured = line("logits", source, *verify)
            yield measured | {"cached": cached, "text_bytes": text.stat().st_size}


def beginning_of_ours(folder: Path) -> Path:
    """Return a file with the first 4 kB of the bundled text."""
    bundled = ROOT / "qwen35_convert" / "text" / "default_text.txt"
    text = folder / "text.txt"
    text.write_text(bundled.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return text


def line(level: str, source: Path, *command: str) -> dict[str, Any]:
    """Run a command on SOURCE; return its figures."""
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return {
        "what": "verify",
        "level": level,
        "gb": round(size / 1e9, 3),
        **measure(*command),
        "cores": ENVIRONMENT["OMP_NUM_THREADS"],
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
