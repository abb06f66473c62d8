"""Artifacts of one source beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from formats.errors import FELL_SHORT
from qwen35_convert.commands.options import (
    BUNDLED,
    Base,
    Device,
    Html,
    Json,
    LogitsCache,
    Memory,
    Quiet,
    Workers,
    merged,
    parse_limit,
    recipe_option,
    text_option,
)
from qwen35_convert.options import DEFAULTS as RUN
from qwen35_convert.options import RunOptions


def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE|ARTIFACT",
            help="The source; with --against, artifacts made from it.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        recipe_option("Convert by this recipe and compare the result. Repeatable."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Source of the artifacts.")
    ] = None,
    base: Base = None,
    text: Annotated[str, text_option("Text to evaluate on.")] = BUNDLED,
    html: Html = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table as CSV.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for temporary files: one artifact, the source's logits.",
            show_default="beside the output",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the converted artifacts in DIR.")
    ] = None,
    logits_cache: LogitsCache = None,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = RUN.device,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare recipes or artifacts by size and KL divergence.

    Example: qwen35 compare ./Qwen3.5-9B --recipe fp8-block --recipe int4 --html page.html
    """
    from qwen35_convert import measuring, report
    from qwen35_convert.comparison.folders import Folders
    from qwen35_convert.durable import check_place, save_file
    from qwen35_convert.heads import FIGURES, PAGE

    source, artifacts = _parted(models or [], against, recipe or [])
    files = [(path, head) for path, head in ((html, PAGE), (csv, FIGURES)) if path]
    for path, head in files:
        check_place(path, head.encode())
    beside = [path.parent for path, _ in files] or [keep or Path()]
    limit = parse_limit(memory_limit)
    comparison = measuring.compare(
        merged(source, base),
        recipe or [],
        artifacts,
        text=text,
        folders=Folders(work or beside[0], keep, logits_cache),
        options=RunOptions(workers=workers, memory_limit=limit, device=device, progress=not quiet),
    )
    if html:
        from qwen35_convert.page.page import page_html

        save_file(html, page_html(comparison).encode())
    if csv:
        save_file(csv, comparison.csv().encode())
    if json:
        report.print_json(comparison.as_dict())
    else:
        from qwen35_convert.comparison.table import comparison_text

        print(comparison_text(comparison))
    if not comparison.passed:
        raise typer.Exit(FELL_SHORT)


def _parted(models: list[str], against: str | None, recipes: list[str]) -> tuple[str, list[str]]:
    """Return the source and the artifacts of a command line. RecipeError."""
    from qwen35_convert.errors import RecipeError

    if against is not None:
        if not models and not recipes:
            raise RecipeError("ARTIFACT is missing", expected="folders or files, or --recipe NAME")
        return against, models
    if not recipes:
        raise RecipeError(
            "compare", "has neither --recipe nor --against", "SOURCE --recipe NAME, or "
            "ARTIFACT --against SOURCE",
        )  # fmt: skip
    if len(models) != 1:
        got = f"has {len(models)} sources" if models else "has no source"
        fix = "to compare artifacts besides, name the source by --against"
        raise RecipeError("compare", got, "one SOURCE --recipe NAME", fix)
    return models[0], []
