"""Measure `qwen35 compare` over several recipes beside as many runs alone, in core seconds.

    python -m benchmarks.compare [--source FOLDER] [--text FILE] [--recipes NAME ...]

A run alone converts by a recipe, then verifies at level logits: two commands. The comparison does
both for all recipes, and runs the source once. Without --source a checkpoint of 0.8B's sizes is
generated, and the text is 4 kB. One JSON line goes to benchmarks/results/compare.jsonl.

The bound: with a pass F over the text, n recipes cost (n + 1) F beside 2 n F, 0.56 for eight. One
of these keeps every weight, and what the source has computed is not computed again: 8 F beside
15 F, 0.53. Less than that comes from starting once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.convert import commit, generate, measure
from benchmarks.lines import record
from benchmarks.verify import NANO, beginning_of_ours

RESULTS = Path(__file__).parent / "results" / "compare.jsonl"
EIGHT = (
    "fp8-block", "fp8-channel", "int4", "int4-g32", "int8", "mxfp4a16", "nvfp4a16", "bf16-split",
)  # fmt: skip
CLI = (sys.executable, "-m", "qwen35_convert.cli")


def main() -> None:
    """Measure, print, keep the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--recipes", nargs="+", default=EIGHT)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        generate(options.generate, "dense")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = run(Path(folder), options)
    record(RESULTS, measured)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return core seconds of the runs alone and of the comparison."""
    source, recipes = options.source, {name: name for name in options.recipes}
    if source is None:
        source = generated(folder / "source")
        recipes = {name: text_only(folder, name) for name in recipes}
    text = options.text or beginning_of_ours(folder)
    alone = {name: one_alone(source, text, folder, one) for name, one in recipes.items()}
    every = [word for one in recipes.values() for word in ("--recipe", one)]
    together = measure(*CLI, "compare", str(source), *every, "--text", str(text), "-q",
                       "--work", str(folder))  # fmt: skip
    total = sum(alone.values())
    return {
        "what": "compare",
        "source": "0.8B, random weights" if options.source is None else source.name,
        "text_bytes": text.stat().st_size,
        "alone_core_s": {name: round(seconds, 1) for name, seconds in alone.items()},
        "together_core_s": round(together["core_s"], 1),
        "ratio": round(together["core_s"] / total, 3),
        "rss_mb": together["rss_mb"],
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(),
    }


def generated(source: Path) -> Path:
    """Return a checkpoint of 0.8B's sizes, made in a process of its own.

    A child's peak memory counts what its parent had when it was started.
    """
    measure(sys.executable, "-m", "benchmarks.compare", "--generate", str(source))
    shutil.copy(NANO / "tokenizer.json", source)
    return source


def text_only(folder: Path, recipe: str) -> str:
    """Return a recipe for what is generated, which has no vision tower."""
    path = folder / f"{recipe}.yaml"
    path.write_text(f"extends: {recipe}\nlayout: text\nvision: drop\n")
    return str(path)


def one_alone(source: Path, text: Path, folder: Path, recipe: str) -> float:
    """Return the core seconds of converting by one recipe and verifying the result."""
    out = folder / "out"
    convert = measure(*CLI, "convert", str(source), "-o", str(out), "--recipe", recipe, "-q")
    verify = measure(*CLI, "verify", str(out), "--against", str(source), "--level", "logits",
                     "--text", str(text), "-q")  # fmt: skip
    shutil.rmtree(out)
    return convert["core_s"] + verify["core_s"]


if __name__ == "__main__":
    main()
