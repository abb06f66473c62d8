"""A checkpoint becomes an artifact: `convert` by a recipe, `quantize` by a scheme."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from formats.errors import FELL_SHORT
from qwen35_convert import completion
from qwen35_convert.commands.goals import (
    GOALS,
    Batch,
    Context,
    Fit,
    SaveRecipe,
    Table,
    TargetBits,
    TargetSize,
    goal_of,
    keep_fitted,
)
from qwen35_convert.commands.options import (
    DEFAULT_RECIPES,
    Base,
    Device,
    Json,
    Junit,
    Memory,
    Metadata,
    NoVerify,
    Out,
    OutputFormat,
    Overwrite,
    PlanOnly,
    Quiet,
    Set,
    Source,
    Stream,
    Template,
    Workers,
    merged,
    parse_limit,
    recipe_option,
)
from qwen35_convert.options import DEFAULTS as RUN
from qwen35_convert.options import RunOptions
from qwen35_convert.output import GITHUB, JSON, Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe.recipe import Recipe
    from qwen35_convert.source import Source as SourceOf


def convert(
    source: Source,
    out: Out,
    recipe: Annotated[str | None, recipe_option("Recipe to follow.", DEFAULT_RECIPES)] = None,
    base: Base = None,
    chat_template: Template = None,
    metadata: Metadata = None,
    set_: Set = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Convert only matching tensors, e.g. 'layers.0.*'."),
    ] = None,
    memory: Fit = None,
    context: Context = None,
    batch: Batch = None,
    target_size: TargetSize = None,
    target_bpw: TargetBits = None,
    table: Table = None,
    save_recipe: SaveRecipe = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = RUN.device,
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    executor: Annotated[
        str,
        typer.Option(
            help="threads, or ray: the nodes of the cluster at RAY_ADDRESS, or of a local one. "
            "--workers and --memory-limit then apply to each node.",
            autocompletion=completion.executors,
        ),
    ] = RUN.executor,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint by a recipe and verify the result.

    Example: qwen35 convert Qwen/Qwen3.5-27B -o Qwen3.5-27B-FP8 --recipe fp8-block
    """
    from qwen35_convert import measuring
    from qwen35_convert.durable import check_place
    from qwen35_convert.errors import RecipeError

    output = Output.of("convert", output_format, junit, json=json)
    overrides = (*(set_ or ()), *_overrides(only, chat_template, metadata))
    options = RunOptions(
        workers=workers,
        memory_limit=parse_limit(memory_limit),
        device=device,
        executor=executor,
        stream=stream,
        overwrite=overwrite,
        verify=not no_verify,
        progress=not quiet,
    )
    model = merged(source, base)
    goal = goal_of(memory, (context, batch), target_size, target_bpw, table)
    if goal is None:
        if table or save_recipe:
            raise RecipeError("--sensitivity and --save-recipe", "are for a size", GOALS)
        _convert(model, out, recipe, options, output, overrides=overrides, plan=plan)
        return
    if save_recipe:
        from qwen35_convert.heads import CHOSEN

        check_place(save_recipe, CHOSEN.encode())
    fitted = measuring.fit_recipe(model, out, goal, recipe, options, overrides=overrides)
    kept = keep_fitted(fitted, save_recipe, progress=options.progress)
    _convert(model, out, kept, options, output, plan=plan)


def _overrides(
    only: str | None, chat_template: Path | None, metadata: Path | None
) -> Iterator[str]:
    """Yield what options of their own change in a recipe, as KEY=VALUE."""
    if only:
        from qwen35_convert.recipe.recipe import quoted

        yield f"only={quoted(only)}"
    if chat_template or metadata:
        from qwen35_convert.card.metadata_file import metadata_override, template_override

        yield from [template_override(chat_template)] if chat_template else []
        yield from [metadata_override(metadata)] if metadata else []


def quantize(
    source: Source,
    out: Out,
    scheme: Annotated[
        str,
        typer.Option(
            help="fp8-block, fp8-channel, nvfp4a16, nvfp4, mxfp4a16, int4 or int8.",
            autocompletion=completion.scheme_names,
        ),
    ],
    base: Base = None,
    set_: Set = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = RUN.device,
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Quantise a checkpoint; names and layout stay as they are.

    Example: qwen35 quantize ./Qwen3.5-9B -o ./Qwen3.5-9B-FP8 --scheme fp8-block
    """
    from qwen35_convert.recipe.choice import quantize_recipe

    output = Output.of("quantize", output_format, junit, json=json)
    recipe = quantize_recipe(scheme, tuple(set_ or ()))
    options = RunOptions(
        workers=workers,
        memory_limit=parse_limit(memory_limit),
        device=device,
        stream=stream,
        overwrite=overwrite,
        verify=not no_verify,
        progress=not quiet,
    )
    _convert(merged(source, base), out, recipe, options, output, plan=plan)


def _convert(
    source: SourceOf,
    out: Path,
    recipe: str | Recipe | None,
    options: RunOptions,
    output: Output,
    *,
    overrides: tuple[str, ...] = (),
    plan: bool,
) -> None:
    from qwen35_convert import api, report

    if plan:
        planned = api.plan(source, recipe, out, overrides=overrides, stream=options.stream)
        _print_plan(planned, json=output.form == JSON)
        return
    if options.progress and output.form != GITHUB:
        options = replace(options, on_plan=report.print_notes)
    done = api.convert(source, out, recipe, options, overrides=overrides)
    output.conversion(done)
    if done.failed:
        print(f"qwen35: {out} was not written: {done.out} failed its verification", file=sys.stderr)
        raise typer.Exit(FELL_SHORT)


def _print_plan(plan: Plan, *, json: bool) -> None:
    from qwen35_convert import report

    if json:
        report.print_json(report.plan_as_dict(plan))
    else:
        print(report.plan_text(plan))
