"""Time `qwen35 convert` with one recipe after another, beside fp8-block: what schemes cost.

    python -m benchmarks.convert_recipes [--case dense | --source FOLDER] [--recipes NAME ...]

Every recipe converts the same checkpoint in turn, as whole processes with a warm page cache; the
first round is not counted. Bytes must be the same in every round. Each line of
benchmarks/results/convert.jsonl has the medians of a recipe, and

    of_fp8_block   its core seconds over those of fp8-block in the same run
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.convert import (
    CASES,
    RESULTS,
    commit,
    convert_command,
    generate_apart,
    measure,
    median,
    remove,
)
from benchmarks.lines import record

BASE = "fp8-block"
# What is timed, and the recipe and settings of it.
RECIPES = {
    BASE: (BASE,),
    "fp8-channel": ("fp8-channel",),
    "nvfp4a16": ("nvfp4a16",),
    "nvfp4a16, modelopt": ("nvfp4a16", "quantize.dialect=modelopt"),
    "mxfp4a16": ("mxfp4a16",),
    "int4": ("int4",),
    "int4, gptq": ("int4", "quantize.dialect=gptq"),
    "int4-g32": ("int4-g32",),
    "int8": ("int8",),
    "nvfp4-mixed": ("nvfp4-mixed",),
    "int4-mixed": ("int4-mixed",),
}
ALIKE = ("--no-verify", "--set", "layout=text", "--set", "vision=drop")


def digest(artifact: Path) -> str:
    """Return a hash of all tensors."""
    found = hashlib.sha256()
    for file in sorted(artifact.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def bench(source: Path, recipes: list[str], repeat: int, out: Path) -> dict[str, dict[str, float]]:
    """Return the medians of each recipe."""
    runs: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in recipes}
    digests: dict[str, str] = {}
    for _ in range(repeat + 1):
        for recipe in recipes:
            remove(out)
            name, *settings = RECIPES[recipe]
            more = [word for setting in settings for word in ("--set", setting)]
            runs[recipe].append(measure(*convert_command(source, out, name), *ALIKE, *more))
            bytes_now = digest(out)
            assert digests.setdefault(recipe, bytes_now) == bytes_now, f"{recipe}: bytes differ"
    remove(out)
    return {recipe: median(found[1:]) for recipe, found in runs.items()}


def lines(case: str, source: Path, options: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Return a line for each recipe."""
    recipes = list(dict.fromkeys([BASE, *options.recipes]))
    found = bench(source, recipes, options.repeat, out)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    same = {"what": "convert", "case": case, "tool": "qwen35", "gb": round(size / 1e9, 3)}
    return [
        same
        | {"recipe": recipe, **figures, "runs": options.repeat}
        | {"of_fp8_block": round(figures["core_s"] / found[BASE]["core_s"], 3), "commit": commit()}
        for recipe, figures in found.items()
    ]


def main() -> None:
    """Run the recipes and append the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--case", choices=list(CASES), default="dense")
    parser.add_argument("--source", type=Path, help="a folder in place of the case")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, case = options.source, options.source.name if options.source else options.case
        if source is None:
            source = Path(folder) / case
            generate_apart(source, case)
        for line in lines(case, source, options, Path(folder) / "out"):
            record(options.results, line)


if __name__ == "__main__":
    main()
