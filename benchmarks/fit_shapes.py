"""What fits a card: types of the 27B and 35B-A3B shapes within a memory, planned from headers.

    python -m benchmarks.fit_shapes --tokenizer FILE [--memory 16GB 24GB] [--context 32768]

Checkpoints have the published shapes and are holes of zeros (`benchmarks.sparse`), so costs are
those by role of small trained models. FILE is a tokenizer.json: its bytes stand in a GGUF file,
padded to the vocabulary. A line for each shape, kind of artifact and memory goes to
benchmarks/results/fit.jsonl: bytes that are free for weights, bytes of the files as they would be
written, and how many weights have each form. An artifact that nothing makes small enough has the
words of the refusal.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import qwen35_convert as q
from benchmarks.convert import commit
from benchmarks.lines import record
from benchmarks.sparse import SHAPES, write_sparse
from qwen35_convert.sizes import parse_size

RESULTS = Path(__file__).parent / "results" / "fit.jsonl"
MODELS, OUTS = ("27B", "35B-A3B"), ("m.gguf", "m")


def main() -> None:
    """Plan, print, keep the lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--memory", nargs="+", default=["16GB", "24GB"])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / model
            write_sparse(source, SHAPES[model])
            shutil.copy(options.tokenizer, source)
            for out in OUTS:
                for memory in options.memory:
                    line = {"what": "fit", "model": model, "commit": commit(), "out": out,
                            "memory": memory, "context": options.context}  # fmt: skip
                    line |= fitted(source, out, memory, options.context)
                    record(RESULTS, line)


def fitted(source: Path, out: str, memory: str, context: int) -> dict[str, Any]:
    """Return what fits, or why nothing does."""
    goal = q.Goal(memory=parse_size(memory), context=context, by_role=True)
    try:
        found = q.fit_recipe(source, out, goal)
    except q.RecipeError as error:
        return {"refused": str(error)}
    plan = q.plan(source, found.recipe, out)
    assert plan.nbytes == found.nbytes <= found.budget
    bits = Counter[str]()
    for item in plan.items:
        bits[item.scheme.name] += prod(item.atom.shape)
    return {
        "budget": found.budget, "nbytes": found.nbytes, "told": found.told,
        "bits": round(8 * found.nbytes / bits.total(), 3),
        "share": {form: round(count / bits.total(), 4) for form, count in bits.most_common()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
