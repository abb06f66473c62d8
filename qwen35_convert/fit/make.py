"""`qwen35 sensitivity`: measure a source over a text and write the table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import CONTAINERS
from qwen35_convert.durable import make_folders, writing
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.fit.measure import Means, measure, num_steps
from qwen35_convert.fit.question import Question
from qwen35_convert.fit.sensitivity import Basis, Sensitivity, forms_of, table_of
from qwen35_convert.fit.sizes import Sizes, sizes_of
from qwen35_convert.levels import LOGITS
from qwen35_convert.options import RunOptions
from qwen35_convert.progress import items_bar
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.text.tokens import DEFAULT, text_path
from qwen35_convert.verification.levels import Level, check_measurable
from qwen35_convert.verification.logits import LogitsCheck, token_rows
from qwen35_convert.write.digests import Digests, sha256_file
from qwen35_convert.write.receipt import Origin


def check_free(out: Path, source: Checkpoint, *, overwrite: bool) -> None:
    """Refuse a file that would destroy something. OutputError."""
    if out.resolve() in {path.resolve() for path in source.read_files()}:
        raise OutputError(f"{out} is a file of the source", fix="choose another OUT")
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists", fix="choose another OUT, or add --overwrite")


def sizes_for(source: Checkpoint, recipe: Recipe, question: Question) -> Sizes:
    """Return the units of a source and their bytes. RecipeError for a slice, or without any."""
    if recipe.only is not None:
        raise RecipeError("only", f"is {recipe.only}", "a whole model: its layers are run")
    name = recipe.export.format
    out = Path(f"model{CONTAINERS[name].ending}")
    sizes = sizes_of(source, recipe, out, forms_of(name, question.forms))
    if not sizes.units:
        raise RecipeError("no weight may have one of these forms", fix="leave --forms out")
    return sizes


def make_sensitivity(
    source: Checkpoint,
    origin: Origin,
    recipe: Recipe,
    question: Question,
    work: Path,
    options: RunOptions,
) -> Sensitivity:
    """Return what each form of each unit costs.

    work     the folder for what the source's pass leaves meanwhile: R*(layers*H + V)*4 bytes of R
             tokens, removed afterwards
    options  of which workers and progress count

    Raises what planning and running raise, before the first weight is read where that is possible.
    """
    import torch

    check_measurable(Level(LOGITS), LogitsCheck(question.text), source)
    sizes = sizes_for(source, recipe, question)
    rows = token_rows(source, question.text)[: question.chunks]
    layers, workers = len(source.config.layer_types), options.threads(streamed=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = num_steps(sizes, layers)
    with writing(work, "making a folder to work in", "nothing"):
        make_folders(work)
        folder = tempfile.TemporaryDirectory(prefix=".qwen35-sensitivity-", dir=work)
    with folder, items_bar(steps, "sensitivity", "step", shown=options.progress) as advance:
        measured = measure(source, sizes, rows, Means(device, workers, Path(folder.name), advance))
    basis = Basis(_source(source, origin, workers), _text(question.text, rows.numel()))
    return table_of(measured, sizes, basis, layers)


def _source(source: Checkpoint, origin: Origin, workers: int) -> dict[str, Any]:
    paths = {source.name_of(path): path for path in source.read_files()}
    with Digests(workers) as digests:
        return origin.describe(digests.describe(paths, origin.known))


def _text(text: str, tokens: int) -> dict[str, Any]:
    name = text if text == DEFAULT else Path(text).name
    return {"name": name, "sha256": sha256_file(text_path(text)), "tokens": tokens}
