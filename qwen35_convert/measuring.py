"""The functions of the Python API that measure: importance, cost, errors, speed.

Sources, recipes, errors, and what is loaded at first: as in api.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.comparison.folders import HERE, Folders
from qwen35_convert.containers.registry import default_recipe
from qwen35_convert.fit.question import USUAL, Question
from qwen35_convert.options import DEFAULTS, RunOptions, check_device
from qwen35_convert.progress import items_bar
from qwen35_convert.recipe.choice import named_recipe
from qwen35_convert.source import Source, open_source, path_here, path_of
from qwen35_convert.text.tokens import DEFAULT

if TYPE_CHECKING:
    from qwen35_convert.benchmarking.bench import Bench
    from qwen35_convert.benchmarking.sweep import Sweep
    from qwen35_convert.comparison.result import Comparison
    from qwen35_convert.containers.gguf.imatrix_file import ImatrixReport
    from qwen35_convert.fit.goal import Fitted, Goal
    from qwen35_convert.fit.sensitivity import Sensitivity
    from qwen35_convert.recipe.recipe import Recipe


def compare(
    source: Source,
    recipes: Sequence[str | Path | Recipe] = (),
    artifacts: Sequence[str | Path] = (),
    *,
    text: str = DEFAULT,
    folders: Folders = HERE,
    options: RunOptions = DEFAULTS,
) -> Comparison:
    """Measure artifacts of one source beside each other: size, KL divergence, where errors enter.

    recipes    each is converted, measured, and removed again
    artifacts  folders and files that are there
    text       the file whose tokens both sides predict; `default` is the bundled one
    folders    where to work, and what is to stay
    options    of which workers, memory_limit, device and progress count

    The source runs once. Each artifact is verified as by `verify` at level logits.
    """
    check_device(options.device, fix="--device cpu quantises without one")
    chosen = [recipe for one in recipes for recipe in [named_recipe(one, ())] if recipe]
    opened, origin = open_source(source, progress=options.progress)
    from qwen35_convert.comparison.candidates import check_candidates, named_candidates
    from qwen35_convert.comparison.measure import Measuring
    from qwen35_convert.comparison.result import Comparison
    from qwen35_convert.verification.logits import LogitsCheck

    with folders.opened() as here:
        candidates = named_candidates(chosen, [path_here(one) for one in artifacts], here.artifacts)
        check, path = LogitsCheck(text, cache=here.cache), path_of(source, opened, origin)
        check_candidates(candidates, opened, check)
        scratch = None if folders.keep else here.artifacts
        measuring = Measuring(opened, origin, path, check, options, scratch)
        return Comparison.of(opened.name, text, list(measuring.entries(candidates)))


def imatrix(
    source: Source,
    out: str | Path,
    *,
    text: str = DEFAULT,
    chunks: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ImatrixReport:
    """Compute an importance matrix over a text and write it as llama.cpp's imatrix file."""
    opened, _ = open_source(source, progress=progress)
    from qwen35_convert.containers.gguf.imatrix_file import make_imatrix

    layers = len(opened.config.layer_types) + opened.layout.form.mtp_layers
    with items_bar(layers, "imatrix", "layer", shown=progress) as advance:
        return make_imatrix(
            opened,
            text,
            Path(out),
            chunks=chunks,
            overwrite=overwrite,
            progress=lambda _: advance(),
        )


def sensitivity(
    source: Source,
    out: str | Path,
    recipe: str | Path | Recipe = "gguf-q8_0",
    question: Question = USUAL,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Sensitivity:
    """Predict what each form of each weight costs in KL, and write the table to `out` as JSON.

    recipe    whose layout the weights have; its rules decide weights that have no choice
    question  the text, how much of it, and the forms
    options   of which workers, overwrite and progress count
    """
    chosen, path = named_recipe(recipe, overrides), Path(out)
    assert chosen is not None, "a recipe is named"
    opened, origin = open_source(source, progress=options.progress)
    from qwen35_convert.durable import check_place, save_file
    from qwen35_convert.fit.make import check_free, make_sensitivity
    from qwen35_convert.heads import COSTS

    check_free(path, opened, overwrite=options.overwrite)
    check_place(path, COSTS.encode())
    table = make_sensitivity(opened, origin, chosen, question, path.parent, options)
    save_file(path, table.content())
    return table


def fit_recipe(
    source: Source,
    out: str | Path,
    goal: Goal,
    recipe: str | Path | Recipe | None = None,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Fitted:
    """Return the recipe of least expected KL that keeps an artifact at `out` within a size.

    goal    memory of an engine, bytes, or bits of each weight; and by which costs to choose
    recipe  to start from: its layout and rules stay; None: as for `convert`

    RecipeError if nothing is that small, and for a table of another source's weights.
    """
    from qwen35_convert.fit.base import base_of
    from qwen35_convert.fit.by_role import ByRole
    from qwen35_convert.fit.goal import check_possible, fit_within
    from qwen35_convert.fit.identity import check_source
    from qwen35_convert.fit.make import make_sensitivity, sizes_for
    from qwen35_convert.fit.sensitivity import read_sensitivity

    chosen, path = named_recipe(recipe, overrides), Path(out)
    known = None if goal.table is None else read_sensitivity(goal.table)
    opened, origin = open_source(source, progress=options.progress)
    chosen = chosen or default_recipe(opened, overrides, out=path)
    chosen = base_of(opened, chosen, goal, path)
    sizes = sizes_for(opened, chosen, Question(forms=known.forms if known else ()))
    check_possible(opened, sizes, goal, path)
    if goal.by_role:
        return fit_within(opened, sizes, ByRole.of(opened, sizes), goal, path)
    if known is None:
        known = make_sensitivity(opened, origin, chosen, USUAL, path.parent, options)
    else:
        known.check(sizes)
        check_source(known, opened, origin, options)
    return fit_within(opened, sizes, known, goal, path)


def bench(artifact: str | Path, sweep: Sweep | None = None, *, progress: bool = False) -> Bench:
    """Time an artifact on this machine and compare it with the hardware limit."""
    opened, _ = open_source(artifact, progress=progress)
    from qwen35_convert.benchmarking.bench import run_bench
    from qwen35_convert.benchmarking.sweep import Sweep

    sweep = sweep or Sweep()
    steps = len(sweep.prefill) + len(sweep.batch)
    with items_bar(steps, "bench", "step", shown=progress) as advance:
        return run_bench(opened, sweep, lambda _: advance())
