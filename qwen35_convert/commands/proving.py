"""An artifact against its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from formats.errors import FELL_SHORT
from qwen35_convert import completion
from qwen35_convert.commands.options import (
    Base,
    Json,
    Junit,
    Memory,
    OutputFormat,
    Quiet,
    Workers,
    merged,
    parse_limit,
)
from qwen35_convert.options import RunOptions
from qwen35_convert.output import JSON, Output


def verify(
    artifact: Annotated[
        str | None, typer.Argument(help="Folder or file to verify.", show_default=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Source it was made from.")
    ] = None,
    base: Base = None,
    level: Annotated[
        str,
        typer.Option(help="structure, tensors or logits.", autocompletion=completion.levels),
    ] = "tensors",
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Text for level logits.", show_default="bundled")
    ] = "default",
    max_kl: Annotated[
        float | None, typer.Option(help="Maximum mean KL divergence, in nats per token.")
    ] = None,
    min_top1: Annotated[float | None, typer.Option(help="Minimum top-1 agreement, 0 to 1.")] = None,
    logits_cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what the source's layers compute."),
    ] = None,
    by_bounds: Annotated[
        bool,
        typer.Option("--by-bounds", help="Judge calibrated weights; run no calibration again."),
    ] = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="List what is checked at which level, and stop.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact: its structure, every value, and its predictions.

    Example: qwen35 verify ./Qwen3.5-27B-FP8 --against Qwen/Qwen3.5-27B
    """
    from qwen35_convert import api, report
    from qwen35_convert.errors import RecipeError

    output = Output.of("verify", output_format, junit, json=json)
    if list_checks:
        report.print_checks(json=output.form == JSON)
        return
    if artifact is None:
        raise RecipeError("ARTIFACT is missing", expected="a folder or file to verify")
    if base is not None and against is None:
        raise RecipeError("--base", "names a model alone", "--against ADAPTER --base SOURCE")
    limit = parse_limit(memory_limit)
    result = api.verify(
        artifact,
        against and merged(against, base),
        level=level,
        logits=api.LogitsCheck(text, max_kl, min_top1, cache=logits_cache),
        options=RunOptions(workers=workers, memory_limit=limit, progress=not quiet),
        by_bounds=by_bounds,
    )
    output.verification(result, artifact)
    if not result.passed:
        raise typer.Exit(FELL_SHORT)
